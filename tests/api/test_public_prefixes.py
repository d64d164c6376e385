"""What an operator makes public becomes the tokens that prompts really begin with."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers.processors import TemplateProcessing

from ktserve.api.public_prefixes import UnusablePublicPrefix, check_context, tokenized
from ktserve.api.tokenization import Tokenization
from ktserve.messages import PublicPrefix as Tokenized
from ktserve.tenancy.tenant import PublicPrefix
from ktserve.tokens import pack, unpack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RULES = "You are the assistant of Example Ltd.\nAnswer in one sentence. "
BEGINNINGS = (
    "Hello",
    "",
    " ",
    "\n",
    "\n\n\nx",
    "0.5",
    "...",
    "\u00e9t\u00e9",
    "<b>",
    "|",
    "\t",
    "'s",
)

WITHOUT_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
)
BEFORE_THE_LAST = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if loop.last %}{{ messages[0].content }} {% endif %}[{{ m.content }}]{% endfor %}"
)
STRIPS = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"


def tokens_of(tokenizer: Any, *declared: PublicPrefix) -> list[list[int]]:
    made = asyncio.run(tokenized(declared, Tokenization(tokenizer)))
    assert [(one.name, one.tenants) for one in made] == [
        (one.name, one.tenants) for one in declared
    ]
    return [unpack(one.prompt).tolist() for one in made]


def system(text: str) -> PublicPrefix:
    return PublicPrefix("rules", ("a", "b"), system=text)


def text(text: str) -> PublicPrefix:
    return PublicPrefix("rules", ("a",), text=text)


@pytest.fixture
def with_template(tokenizer: Any) -> Callable[[str | None], Any]:
    def make(template: str | None) -> Any:
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = template
        return changed

    return make


@pytest.fixture
def prompts(
    lab: Any, post_many: Callable[..., list[httpx.Response]]
) -> Callable[[str, Sequence[dict[str, object]]], list[bytes]]:
    """The prompts that the engine gets of bodies."""

    def work(path: str, bodies: Sequence[dict[str, object]]) -> list[bytes]:
        engine = lab.says("Hi")
        responses = post_many(lab.app(engine), path, [json.dumps(body).encode() for body in bodies])
        assert {response.status_code for response in responses} == {200}
        return [request.prompt for request in engine.requests]

    return work


def chat(*contents: str, first: str = RULES) -> dict[str, object]:
    roles = ["user", "assistant"] * len(contents)
    turns = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    return {"messages": [{"role": "system", "content": first}, *turns]}


def test_every_chat_with_the_system_message_begins_with_the_prefix(
    tokenizer: Any, prompts: Callable[..., list[bytes]]
) -> None:
    (prefix,) = tokens_of(tokenizer, system(RULES))
    assert RULES.strip() in tokenizer.decode(prefix)
    chats = [chat(beginning, *turns) for beginning in BEGINNINGS for turns in ((), ("x", "y"))]
    assert all(prompt.startswith(pack(prefix)) for prompt in prompts(CHAT, chats))
    (other,) = prompts(CHAT, [chat("Hello", first="You are another. ")])
    assert not other.startswith(pack(prefix))


@pytest.mark.parametrize("public", ["The quick brown fox.", "Ends with a space ", "Two lines\n\n"])
def test_every_completion_of_the_text_begins_with_the_prefix(
    tokenizer: Any, prompts: Callable[..., list[bytes]], public: str
) -> None:
    (prefix,) = tokens_of(tokenizer, text(public))
    assert len(prefix) >= 2
    assert public.startswith(tokenizer.decode(prefix))
    bodies = [{"prompt": public + beginning} for beginning in BEGINNINGS]
    assert all(prompt.startswith(pack(prefix)) for prompt in prompts(COMPLETIONS, bodies))
    (other,) = prompts(COMPLETIONS, [{"prompt": "x" + public}])
    assert not other.startswith(pack(prefix))


def test_prefixes_come_in_the_order_of_their_declaration(tokenizer: Any) -> None:
    one, other = tokens_of(tokenizer, text("The quick brown fox"), system(RULES))
    assert (one, other) == (
        *tokens_of(tokenizer, text("The quick brown fox")),
        *tokens_of(tokenizer, system(RULES)),
    )
    assert asyncio.run(tokenized((), Tokenization(tokenizer))) == ()


def test_the_log_has_names_and_counts_and_never_a_text(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        (prefix,) = tokens_of(tokenizer, system(RULES))
    said = [one.getMessage() for one in caplog.records if one.name.startswith("ktserve")]
    assert said == [f"public prefix rules: {len(prefix)} tokens"]


def test_a_prefix_must_leave_room_for_a_token_of_output(lab: Any) -> None:
    info = msgspec.structs.replace(lab.says("").info, context_length=8)

    def prefix(length: int) -> Tokenized:
        return Tokenized(name="rules", tenants=("a",), prompt=pack([5] * length))

    check_context([prefix(1), prefix(7)], info)
    with pytest.raises(UnusablePublicPrefix, match=r"rules: it has 8 tokens.*of 8 has room for 7"):
        check_context([prefix(1), prefix(8)], info)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "public prefix rules: the model has no chat template.*--chat-template FILE"),
        (WITHOUT_SYSTEM, "public prefix rules: chats do not begin with the system message"),
        (BEFORE_THE_LAST, "public prefix rules: chats do not begin with the system message"),
        (REFUSES_SYSTEM, r"public prefix rules: .* refuses a system message \(no system\)"),
    ],
)
def test_a_template_without_a_system_message_at_the_beginning_is_refused(
    with_template: Callable[[str | None], Any], template: str | None, problem: str
) -> None:
    changed = with_template(template)
    with pytest.raises(UnusablePublicPrefix, match=problem):
        tokens_of(changed, system(RULES))
    assert tokens_of(changed, text("The quick brown fox"))[0]


def test_only_a_text_gets_the_tokenizers_own_first_token(tokenizer: Any) -> None:
    # As with the routes: a chat template writes it itself.
    changed = copy.deepcopy(tokenizer)
    first = changed.convert_tokens_to_ids("<|endoftext|>")
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", first)]
    )
    story, rules = text("The quick brown fox"), system(RULES)
    assert tokens_of(changed, story) == [[first, *tokens_of(tokenizer, story)[0]]]
    assert tokens_of(changed, rules) == tokens_of(tokenizer, rules)
    with pytest.raises(UnusablePublicPrefix):
        tokens_of(changed, text(" "))


def test_a_template_may_strip_the_message(with_template: Callable[[str | None], Any]) -> None:
    changed = with_template(STRIPS)
    assert RULES.strip() in changed.decode(tokens_of(changed, system(f"  {RULES}\n"))[0])


def test_a_text_that_no_prompts_have_a_token_of_in_common_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UnusablePublicPrefix, match=r"public prefix rules: .*use a longer"):
        tokens_of(tokenizer, text(" "))
