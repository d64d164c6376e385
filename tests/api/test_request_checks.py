"""What is refused before the engine hears of it: by name, with the limit, never with a 500."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from ktserve.api import fields
from ktserve.tokens import unpack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


Post = Callable[..., httpx.Response]


@pytest.fixture
def post(post_many: Callable[..., list[httpx.Response]]) -> Post:
    """One raw body posted to an application."""

    def work(app: Any, path: str, content: bytes) -> httpx.Response:
        return post_many(app, path, [content])[0]

    return work


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {" 7": 1}),
        ("logit_bias", {"7": 1, "07": 1}),
        ("logit_bias", []),
        ("seed", 2**63),
        ("seed", True),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", "x" * 1001),
        ("stop", "\ud800"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", 10**30),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("logprobs", True),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("best_of", 2),
        ("max_completion_tokens", 5),
        ("user", 5),
        ("safety_identifier", {}),
        ("metadata", "x"),
        ("service_tier", True),
        ("prompt_cache_key", ["x"]),
        ("prompt_cache_retention", 5),
        ("prediction", "x"),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [[1], "a"]),
        ("prompt", ["a", 1]),
        ("prompt", [1, "a"]),
        ("prompt", [1, 99999999]),
        ("prompt", [1.0]),
        ("prompt", [True]),
        ("prompt", [None]),
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", "\ud800"),
        ("prompt", ["a"] * 257),
        ("model", 5),
    ],
)
def test_a_bad_value_is_refused_by_name(lab: Any, post: Post, field: str, value: object) -> None:
    engine = lab.says("Hi")
    body = {"prompt": "x", "max_tokens": 16, field: value}
    # json= of the client refuses to write a lone surrogate.
    content = json.dumps(body).encode()
    app = lab.app(engine)
    error = refused(post(app, COMPLETIONS, content))
    assert error["param"].startswith(field)
    assert field in error["message"]
    assert engine.requests == []


def test_the_same_body_with_good_values_passes(lab: Any, post: Post) -> None:
    app = lab.app(lab.says("Hi"))
    assert post(app, COMPLETIONS, b'{"prompt": "x", "max_tokens": 16}').status_code == 200


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 5000])
@pytest.mark.parametrize("field", ["temperature", "top_k", "seed", "logprobs"])
def test_numbers_that_are_none_are_refused(lab: Any, post: Post, literal: str, field: str) -> None:
    body = f'{{"prompt": "x", "{field}": {literal}}}'.encode()
    error = refused(post(lab.app(lab.says("Hi")), COMPLETIONS, body))
    assert error["param"] == field or "number" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("store", True),
        ("logits_processors", ["x"]),
        ("chat_template", "x"),
        ("chat_template_kwargs", {"a": 1}),
        ("reasoning_effort", "high"),
        ("continue_final_message", True),
        ("use_beam_search", True),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    lab: Any, field: str, value: object
) -> None:
    error = refused(lab.post(lab.says("Hi"), CHAT, {**HELLO, field: value}))
    assert error["param"] == field
    assert "not supported by this version" in error["message"]


def test_what_asks_for_nothing_is_accepted(lab: Any) -> None:
    neutral: dict[str, object] = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "user": "somebody",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "parallel_tool_calls": True,
        "temperature": None,
        "cache_salt": None,
        "stop": None,
    }
    assert lab.post(lab.says("Hi"), CHAT, {**HELLO, **neutral}).status_code == 200


def test_false_is_not_zero_and_one_is_not_true(lab: Any) -> None:
    error = refused(lab.post(lab.says("Hi"), CHAT, {**HELLO, "store": 0}))
    assert error["param"] == "store"


def test_an_unknown_field_is_refused_with_the_nearest_name(lab: Any) -> None:
    error = refused(lab.post(lab.says("Hi"), CHAT, {**HELLO, "temprature": 1}))
    assert error["message"] == "unknown field 'temprature'; did you mean 'temperature'?"
    hostile = "\x1b[31m" + "x" * 5000
    error = refused(lab.post(lab.says("Hi"), CHAT, {**HELLO, hostile: 1}))
    assert "\x1b" not in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "foo": 1}], "messages[0].foo"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_a_bad_message_is_named(lab: Any, post: Post, messages: object, param: str) -> None:
    body = json.dumps({"messages": messages}).encode()
    assert refused(post(lab.app(lab.says("Hi")), CHAT, body))["param"] == param


def test_an_answers_message_can_be_sent_back(lab: Any) -> None:
    answer = lab.post(lab.says("Hi"), CHAT, HELLO).json()["choices"][0]["message"]
    body = {"messages": [*HELLO["messages"], answer, {"role": "user", "content": "And?"}]}
    assert lab.post(lab.says("Hi"), CHAT, body).status_code == 200


def test_a_template_that_refuses_is_a_400(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.tokenizer, "chat_template", "{{ raise_exception('no\x1b way') }}")
    error = refused(lab.post(lab.says("Hi"), CHAT, HELLO))
    assert error["code"] == "chat_template_error"
    assert "\x1b" not in error["message"]
    monkeypatch.setattr(lab.tokenizer, "chat_template", None)
    assert "--chat-template" in refused(lab.post(lab.says("Hi"), CHAT, HELLO))["message"]


def test_both_names_of_max_tokens_must_agree(lab: Any) -> None:
    body = {**HELLO, "max_tokens": 5, "max_completion_tokens": 6}
    assert refused(lab.post(lab.says("Hi"), CHAT, body))["param"] == "max_tokens"
    body["max_completion_tokens"] = 5
    assert lab.post(lab.says("Hi"), CHAT, body).status_code == 200


def test_a_completion_that_sets_a_chats_max_tokens_is_told_its_own(lab: Any) -> None:
    body = {"prompt": "x", "max_completion_tokens": 5}
    error = refused(lab.post(lab.says("Hi"), COMPLETIONS, body))
    assert error["code"] == "unsupported_parameter"
    assert error["message"].endswith("; use max_tokens")


def test_inert_fields_of_a_chat_are_of_their_type(lab: Any) -> None:
    body = {**HELLO, "parallel_tool_calls": "yes"}
    assert refused(lab.post(lab.says("Hi"), CHAT, body))["param"] == "parallel_tool_calls"
    options = {**HELLO, "stream": True, "stream_options": {"include_obfuscation": 1}}
    error = refused(lab.post(lab.says("Hi"), CHAT, options))
    assert error["param"] == "stream_options.include_obfuscation"
    options["stream_options"] = {"include_obfuscation": False}
    assert lab.post(lab.says("Hi"), CHAT, options).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
def test_a_name_is_honoured_or_refused(
    lab: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    messages = [*HELLO["messages"], {"role": "user", "content": "Hello", "name": "Ann"}]
    error = refused(lab.post(lab.says("Hi"), path, {"messages": messages}))
    assert error["param"] == "messages[1].name"
    assert error["code"] == "unsupported_parameter"
    writes_names = (
        "{% for m in messages %}{{ m['role'] }} "
        "{% if m['role'] == 'user' %}{{ m['name'] }}{% endif %}: {{ m['content'] }}\n{% endfor %}"
    )
    monkeypatch.setattr(lab.tokenizer, "chat_template", writes_names)
    engine = lab.says("Hi")
    assert lab.post(engine, CHAT, {"messages": messages}).status_code == 200
    text = lab.tokenizer.decode(unpack(engine.requests[0].prompt).tolist())
    assert text == "user : Hello\nuser Ann: Hello\n"
    # The template writes the names of users alone.
    messages.append({"role": "assistant", "content": "Hello", "name": "Ann"})
    error = refused(lab.post(lab.says("Hi"), path, {"messages": messages}))
    assert error["param"] == "messages[2].name"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [(CHAT, HELLO, "messages"), (COMPLETIONS, {"prompt": ["\t", "Hello"]}, "prompt")],
)
def test_text_beyond_the_models_vocabulary_is_refused_by_field(
    lab: Any, path: str, body: Any, param: str
) -> None:
    engine = lab.says("Hi")
    highest = max(lab.ids("Hello"))
    engine.info = msgspec.structs.replace(engine.info, vocab_size=highest)
    error = refused(lab.post(engine, path, body))
    assert error["param"] == param
    assert f"the model has ids from 0 to {highest - 1}" in error["message"]
    assert "Hello" not in error["message"]
    assert engine.requests == []


def test_top_logprobs_needs_logprobs(lab: Any) -> None:
    assert refused(lab.post(lab.says("Hi"), CHAT, {**HELLO, "top_logprobs": 2}))["param"] == (
        "top_logprobs"
    )


def test_what_cannot_fit_is_refused_with_the_numbers(lab: Any) -> None:
    for body, param in (
        ({"prompt": [500] * 2000, "max_tokens": 49}, "max_tokens"),
        ({"prompt": [500] * 2048}, "prompt"),
        ({"prompt": [500] * 2049}, "prompt"),
        ({"prompt": "word " * 3000}, "prompt"),
        ({"prompt": "x" * 500_000}, "prompt"),
    ):
        engine = lab.says("Hi")
        error = refused(lab.post(engine, COMPLETIONS, body))
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
        assert "2048" in error["message"]
        assert engine.requests == []
    fits = {"prompt": [500] * 2000, "max_tokens": 48}
    assert lab.post(lab.says("Hi"), COMPLETIONS, fits).status_code == 200


def test_what_the_pool_cannot_hold_is_refused(lab: Any) -> None:
    engine = lab.says("Hi")
    engine.info = msgspec.structs.replace(engine.info, pool_tokens=100)
    error = refused(lab.post(engine, COMPLETIONS, {"prompt": [500] * 90, "max_tokens": 11}))
    assert error["code"] == "pool_exceeded"
    fits = {"prompt": [500] * 90, "max_tokens": 10}
    assert lab.post(engine, COMPLETIONS, fits).status_code == 200
    lab.post(engine, CHAT, HELLO)
    chat = engine.requests[-1]
    assert chat.sampling.max_tokens == 100 - len(chat.prompt) // 4


def test_what_a_tenant_cannot_get_of_the_pool_is_refused(lab: Any) -> None:
    engine = lab.says("Hi")
    info = engine.info

    def post(capacity: dict[str, int], max_tokens: int) -> httpx.Response:
        engine.info = msgspec.structs.replace(info, capacity_tokens=capacity)
        body = {"prompt": [500] * 90, "max_tokens": max_tokens}
        return lab.post(engine, COMPLETIONS, body, cache_sharing="partitioned")

    error = refused(post({"default": 100, "other": 4096}, 11))
    assert (error["code"], error["param"]) == ("tenant_pool_exceeded", "max_tokens")
    assert "--cache-sharing partitioned" in error["message"]
    assert "100 tokens" in error["message"]
    assert post({"default": 100}, 10).status_code == 200
    assert post({"default": 101}, 11).status_code == 200
    # Of a tenant that the engine does not know the engine itself says what fits.
    assert post({"other": 100}, 11).status_code == 200
    engine.info = msgspec.structs.replace(info, capacity_tokens={"default": 100})
    assert lab.post(engine, CHAT, HELLO).status_code == 200
    chat = engine.requests[-1]
    assert chat.sampling.max_tokens == 100 - len(chat.prompt) // 4


def test_another_model_is_a_404(lab: Any) -> None:
    for name in ("other", "tiny:lora", "tiny/", "", "TINY"):
        error = refused(lab.post(lab.says("Hi"), CHAT, {**HELLO, "model": name}), 404)
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b"\x00" * 100, "invalid_json"),
        (b'{"prompt": "a\x00b"}', "invalid_json"),
        (b"[" * 200_000, "invalid_json"),
        (b'{"a":' * 200_000, "invalid_json"),
        (b'{"prompt": "x", "cache_salt": "a", "cache_salt": "b"}', "duplicate_field"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/tokenize", "/v1/detokenize"])
def test_a_body_that_is_no_object_is_a_400(
    lab: Any, post: Post, path: str, content: bytes, code: str
) -> None:
    assert refused(post(lab.app(lab.says("Hi")), path, content))["code"] == code


def test_an_escaped_nul_in_a_prompt_is_text(lab: Any) -> None:
    assert lab.post(lab.says("Hi"), COMPLETIONS, {"prompt": "a\x00b"}).status_code == 200


def test_a_body_that_is_too_large_is_a_413(lab: Any, post: Post) -> None:
    app = lab.app(lab.says("Hi"), max_request_bytes=1024)
    body = json.dumps({"prompt": "x" * 2000}).encode()
    error = refused(post(app, COMPLETIONS, body), 413)
    assert "--max-request-bytes" in error["message"]
    assert "1024" in error["message"]


def test_a_form_post_is_refused(lab: Any, call: Post) -> None:
    # What any web page may send to a server on the reader's own machine.
    response = call(lab.app(lab.says("Hi")), "POST", CHAT, content=json.dumps(HELLO))
    assert refused(response, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "\x01"])
def test_a_body_in_an_encoding_is_refused(lab: Any, call: Post, encoding: str) -> None:
    app = lab.app(lab.says("Hi"))
    response = call(app, "POST", CHAT, json=HELLO, headers={"Content-Encoding": encoding})
    error = refused(response, 415)
    assert "Content-Encoding" in error["message"]
    assert "\x01" not in error["message"]
    headers = {"Content-Encoding": "Identity"}
    assert call(app, "POST", CHAT, json=HELLO, headers=headers).status_code == 200


def test_too_many_texts_in_one_request(lab: Any) -> None:
    body = {"prompt": [[500]] * 100, "n": 3}
    assert refused(lab.post(lab.says("Hi"), COMPLETIONS, body))["param"] == "n"


def test_every_field_is_declared_for_the_documentation() -> None:
    rows = fields.listed({"chat": fields.CHAT_FIELDS, "completions": fields.COMPLETION_FIELDS})
    assert ("chat", "temperature", "honoured", "0 is greedy") in rows
    assert {use for _, _, use, _ in rows} == {"honoured", "inert", "refused"}
    assert all(meaning for _, _, _, meaning in rows)


VALUES: list[object] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, -(2**70), 1.5, float("nan"), float("inf"),
    "", "x", "\x00", "\ud800", "x" * 3000, [], [[]], [None], [1, 2], ["a"], [["a"]], {}, {"a": 1},
    {"7": 1}, [{}], [{"role": "user", "content": "x"}], [{"type": "text", "text": "x"}],
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "table"),
    [
        (CHAT, fields.CHAT_FIELDS),
        (COMPLETIONS, fields.COMPLETION_FIELDS),
        ("/v1/tokenize", fields.TOKENIZE_FIELDS),
        ("/v1/detokenize", fields.DETOKENIZE_FIELDS),
    ],
)
def test_no_mutated_body_is_a_server_error(
    lab: Any, path: str, table: fields.FieldTable, post_many: Callable[..., list[httpx.Response]]
) -> None:
    chance = random.Random(7)
    names = [*table.fields, "unknown"]
    bases: dict[str, dict[str, object]] = {
        CHAT: {**HELLO},
        "/v1/detokenize": {"tokens": [1]},
    }
    base = bases.get(path, {"prompt": "x"})
    bodies = []
    for _ in range(400):
        body: dict[str, object] = {**base}
        for name in chance.sample(names, chance.randint(1, 3)):
            body[name] = chance.choice(VALUES)
        bodies.append(json.dumps(body).encode())
    responses = post_many(lab.app(lab.says("Hi")), path, bodies)
    assert {response.status_code for response in responses} <= {200, 400, 404}
    assert any(response.status_code == 200 for response in responses)
