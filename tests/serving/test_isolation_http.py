"""The report's sequence, through HTTP, with the official client.

Five contexts send the same prompt of about 450 tokens. On the server of the report all five hit one
cache. Here each context's first request finds nothing, and each one's second finds all but the last
token: the positive control beside every negative.
"""

from __future__ import annotations

import json
import random
import string
from typing import Any

import httpx
import openai
import pytest
from servers import KEYS, Server

MODEL = "SmolLM2-135M-Instruct"
WORDS = ["river", "stone", "cloud", "paper", "green", "house", "light", "music", "winter"]
# A letter is one token, and no two letters are the same one.
_first_words = iter(string.ascii_letters + string.digits)


def fresh_prompt(words: int = 440) -> str:
    """About 450 tokens that share not even the first with any other prompt of these tests."""
    first = next(_first_words)
    draw = random.Random(first)
    return " ".join([first, *(draw.choice(WORDS) for _ in range(words))])


def client(server: Server, key: str = "alpha") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEYS[key], max_retries=0)


def ask(
    server: Server, endpoint: str, prompt: str, *, key: str = "alpha", **body: Any
) -> tuple[int, int]:
    """(prompt tokens, cached tokens) of one request."""
    if endpoint == "completions":
        usage = (
            client(server, key)
            .completions.create(
                model=MODEL, prompt=prompt, max_tokens=1, temperature=0, extra_body=body
            )
            .usage
        )
    else:
        usage = (
            client(server, key)
            .chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=1,
                temperature=0,
                extra_body=body,
            )
            .usage
        )
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    return usage.prompt_tokens, cached


def template_start(server: Server, endpoint: str, **body: Any) -> int:
    """What two different prompts of this very context share by the chat template's own start.

    Sends two prompts that differ from their first word on, so that whatever is cached is the
    template's. Afterwards the template's start is known to be warm in this context.
    """
    if endpoint == "completions":
        return 0
    key = body.pop("key", "alpha")
    ask(server, endpoint, fresh_prompt(5), key=key, **body)
    return ask(server, endpoint, fresh_prompt(5), key=key, **body)[1]


CONTEXTS: list[dict[str, Any]] = [
    {},
    {"cache_salt": "tenant-one"},
    {"cache_salt": "tenant-two"},
    {"extra_key": "tenant-one"},
    {"cache_salt": "tenant-one", "extra_key": "tenant-two"},
]
COLLISIONS: list[dict[str, Any]] = [
    {"cache_salt": "a", "extra_key": "bc"},
    {"cache_salt": "ab", "extra_key": "c"},
    {"cache_salt": "abc"},
    {"extra_key": "abc"},
    {"cache_salt": "bc", "extra_key": "a"},
    {"cache_salt": "a"},
    {"cache_salt": "A"},
    {"cache_salt": "a "},
    {"cache_salt": "\u00e9"},
    {"cache_salt": "e\u0301"},
]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("contexts", [CONTEXTS, COLLISIONS], ids=["report", "collisions"])
def test_each_context_has_a_cache_of_its_own(packaged, endpoint, contexts):
    # The start that every chat shares is warmed in each context first, and is all that may hit.
    starts = [template_start(packaged, endpoint, **context) for context in contexts]
    prompt = fresh_prompt()
    first = [ask(packaged, endpoint, prompt, **context) for context in contexts]
    second = [ask(packaged, endpoint, prompt, **context) for context in contexts]
    assert all(tokens > 400 for tokens, _ in first)
    assert [cached for _, cached in first] == starts
    assert [cached for _, cached in second] == [tokens - 1 for tokens, _ in second]
    assert max(starts) < 40


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_keys_of_two_tenants_never_share_and_of_one_tenant_do(packaged, endpoint):
    starts = {
        key: template_start(packaged, endpoint, key=key, cache_salt="same")
        for key in ("alpha", "beta")
    }
    prompt = fresh_prompt()
    # The same salt from another tenant is another namespace; no header or user field changes it.
    assert ask(packaged, endpoint, prompt, cache_salt="same")[1] == starts["alpha"]
    other = ask(packaged, endpoint, prompt, key="beta", cache_salt="same", user="alpha")
    assert other[1] == starts["beta"]
    tokens, cached = ask(packaged, endpoint, prompt, key="alpha-2", cache_salt="same")
    assert cached == tokens - 1


def test_completions_and_chat_of_one_namespace_share_and_of_two_do_not(packaged):
    """The same token ids by way of both endpoints."""
    text = fresh_prompt()
    headers = {"Authorization": f"Bearer {KEYS['alpha']}"}
    rendered = httpx.post(
        packaged.url + "/v1/tokenize",
        json={"model": MODEL, "messages": [{"role": "user", "content": text}]},
        headers=headers,
    ).json()["tokens"]

    def complete(**body: Any) -> int:
        answer = httpx.post(
            packaged.url + "/v1/completions",
            json={"model": MODEL, "prompt": rendered, "max_tokens": 1, **body},
            headers=headers,
            timeout=60,
        ).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    tokens, _ = ask(packaged, "chat", text, cache_salt="both")
    assert tokens == len(rendered)
    assert complete(cache_salt="other") == 0
    assert complete(cache_salt="both") == tokens - 1


def test_a_batch_takes_one_salt_for_each_prompt(packaged):
    prompt = fresh_prompt(60)
    headers = {"Authorization": f"Bearer {KEYS['alpha']}"}

    def batch(salts: Any) -> httpx.Response:
        return httpx.post(
            packaged.url + "/v1/completions",
            json={
                "model": MODEL,
                "prompt": [prompt, prompt, prompt],
                "max_tokens": 1,
                "cache_salt": salts,
            },
            headers=headers,
            timeout=60,
        )

    def cached(salts: Any) -> int:
        return int(batch(salts).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    length = ask(packaged, "completions", prompt, cache_salt="batch-warm")[0]
    assert cached(["batch-1", "batch-2", None]) == 0
    assert cached(["batch-1", "batch-2", None]) == 3 * (length - 1)
    assert cached(["batch-3", "batch-warm", "batch-4"]) == length - 1
    for wrong in (["a", "b"], ["a", "b", ""], ["a", "b", 3], [["a"], "b", "c"]):
        answer = batch(wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("cache_salt")


def test_n_choices_count_the_prompt_once(packaged):
    prompt = fresh_prompt(60)
    create = client(packaged).completions.create
    arguments: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 2,
        "n": 3,
        "extra_body": {"cache_salt": "n"},
    }
    first, second = create(**arguments), create(**arguments)
    assert len(first.choices) == len(second.choices) == 3
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("value", ["", "a\x00b", "a\nb", "\x7f", "x" * 1025, 5, True, {}, "\ud800"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_bad_values_fail_closed(packaged, endpoint, field, value):
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 1, field: value}
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body["prompt"] = "hello"
    answer = httpx.post(
        packaged.url + f"/v1/{'chat/' if endpoint == 'chat' else ''}completions",
        content=json.dumps(body),
        headers={"Authorization": f"Bearer {KEYS['alpha']}", "Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_no_prompt_key_or_salt_is_in_the_log(packaged):
    canary = "canary-4f1c"
    hidden = {"cache_salt": f"{canary}-salt", "extra_key": f"{canary}-key"}
    ask(packaged, "chat", f"{canary}-prompt", **hidden)
    log = packaged.log()
    assert "ns-" in log  # the request is there, under its pseudonym
    assert canary not in log
    assert not [key for key in KEYS.values() if key in log]
