"""The field ``cache`` and a public prefix, through HTTP, with the official client.

One server with fixed shares for two tenants: alpha reads the public prefix, beta does not. Every
test has salts of its own, so that what it finds is what it kept, or what is public.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from servers import KEYS, TENANTS, Server

MODEL = "small"
RULES = "You are the assistant of a small museum. Answer in one short and friendly sentence."
PUBLIC = f"""
[[public]]
name = "house"
tenants = ["alpha"]
system = "{RULES}"
"""
KEPT = re.compile(r"public prefix house: (\d+) tokens are kept")
TOKENIZED = re.compile(r"public prefix house: (\d+) tokens(?! are)")
LONG = "river stone cloud paper green house light music winter " * 4


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, its public prefix computed."""
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    tenants.write_text(TENANTS + PUBLIC)
    server = Server(
        *(str(small_model), "--load-format", "dummy", "--random-seed", "1"),
        *("--served-model-name", MODEL, "--cpu-threads", "1", "--max-total-tokens", "8192"),
        *("--tenants", str(tenants), "--cache-sharing", "partitioned"),
    )
    try:
        server.wait_ready()
        server.wait(lambda: KEPT.search(server.log()) is not None, 30)
        yield server
    finally:
        server.stop()


def client(server: Server, key: str = "alpha") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEYS[key], max_retries=0)


def chat(server: Server, user: str, *, key: str = "alpha", rules: str = RULES, **body: Any) -> int:
    """The cached tokens of a chat."""
    answer = client(server, key).chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": rules}, {"role": "user", "content": user}],
        max_tokens=1,
        extra_body=body,
    )
    return cached(answer.usage)


def complete(server: Server, salt: str, cache: dict[str, Any] | None = None) -> tuple[int, int]:
    """(prompt tokens, cached tokens) of the same completion, in the namespace of ``salt``."""
    body = {"cache_salt": salt} | ({} if cache is None else {"cache": cache})
    usage = (
        client(server)
        .completions.create(model=MODEL, prompt=LONG, max_tokens=1, extra_body=body)
        .usage
    )
    assert usage is not None
    return usage.prompt_tokens, cached(usage)


def cached(usage: CompletionUsage | None) -> int:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    count = usage.prompt_tokens_details.cached_tokens
    assert count is not None
    return count


def test_a_reader_s_first_chat_finds_the_public_prefix_and_another_tenant_s_does_not(
    server: Server,
) -> None:
    kept = KEPT.search(server.log())
    assert kept is not None
    tokens = int(kept[1])
    assert tokens >= len(RULES.split())
    # Each chat is the first of its namespace: nothing but what is public can be found.
    assert chat(server, "Hello", cache_salt="reader-1") == tokens
    assert chat(server, "When do you open?", cache_salt="reader-2") == tokens
    assert chat(server, "Hello", key="beta", cache_salt="reader-1") == 0
    assert chat(server, "Hello", key="beta") == 0
    # The positive control: what beta could not find in public it finds as its own.
    assert chat(server, "Hello", key="beta") > tokens


def test_another_system_message_is_not_the_public_one(server: Server) -> None:
    assert chat(server, "Hello", rules="Be brief.", cache_salt="other-rules") == 0
    assert chat(server, "Hello", rules="Be brief.", cache_salt="other-rules") > 0


def test_the_log_has_the_prefix_s_name_and_tokens_and_never_its_text(server: Server) -> None:
    tokenized, kept = TOKENIZED.search(server.log()), KEPT.search(server.log())
    assert tokenized is not None
    assert kept is not None
    assert tokenized[1] == kept[1]  # pages of one token
    assert "museum" not in server.log()


def test_insert_false_leaves_nothing_and_finds_what_is_kept(server: Server) -> None:
    tokens, found = complete(server, "insert", {"insert": False})
    assert (tokens > 30, found) == (True, 0)
    assert complete(server, "insert") == (tokens, 0)
    assert complete(server, "insert", {"insert": False}) == (tokens, tokens - 1)


def test_lookup_false_finds_nothing_and_keeps(server: Server) -> None:
    tokens, found = complete(server, "lookup", {"lookup": False})
    assert found == 0
    assert complete(server, "lookup") == (tokens, tokens - 1)
    assert complete(server, "lookup", {"lookup": False}) == (tokens, 0)


def test_lookup_false_does_without_the_public_prefix_too(server: Server) -> None:
    assert chat(server, "Hello", cache_salt="no-lookup", cache={"lookup": False}) == 0


@pytest.mark.parametrize("cache", [{"insert": False}, {"lookup": False}])
def test_what_is_kept_or_found_changes_no_answer(server: Server, cache: dict[str, Any]) -> None:
    def texts(**body: Any) -> list[str]:
        answer = client(server).completions.create(
            model=MODEL,
            prompt=[LONG, "one two three"],
            n=3,
            max_tokens=8,
            seed=7,
            extra_body=body,
        )
        return [choice.text for choice in answer.choices]

    salt = f"answers-{next(iter(cache))}"
    expected = texts(cache_salt=salt)
    assert len(set(expected)) == 6
    assert texts(cache_salt=salt, cache=cache) == expected
    assert texts(cache_salt=f"{salt}-2", cache=cache) == expected


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize(
    ("cache", "param", "says"),
    [
        (5, "cache", "must be an object"),
        ({"inserts": False}, "cache.inserts", "did you mean 'insert'?"),
        ({"insert": "no"}, "cache.insert", "must be true or false"),
        ({"lookup": 0}, "cache.lookup", "must be true or false"),
        ({"priority": 101}, "cache.priority", "must be from 0 to 100"),
        ({"priority": 1}, "cache.priority", "--radix-eviction-policy priority"),
    ],
)
def test_a_bad_cache_is_refused_by_name(
    server: Server, route: str, cache: Any, param: str, says: str
) -> None:
    api = client(server)
    create: Callable[..., object] = (
        partial(api.chat.completions.create, messages=[{"role": "user", "content": "Hello"}])
        if route == "chat"
        else partial(api.completions.create, prompt="Hello")
    )
    with pytest.raises(openai.BadRequestError) as refusal:
        create(model=MODEL, extra_body={"cache": cache})
    assert refusal.value.param == param
    assert says in refusal.value.message
