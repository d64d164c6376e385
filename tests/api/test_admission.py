"""A tenant's place is held from before its request is read, and texts are bounded before they are
tokenized, so that no tenant's texts hold up another's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rosters import with_keys
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from ktserve.api.engine_client import EngineClient, EngineError
from ktserve.api.errors import ApiError
from ktserve.api.tokenization import INLINE_CHARACTERS, THREADS, Tokenization
from ktserve.messages import Drain, Request, SamplingParams
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenants import Limits, Tenant, Tenants
from ktserve.tokens import pack

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "x"},
    "/v1/tokenize": {"prompt": "x"},
    "/v1/detokenize": {"tokens": [500]},
}
ROUTES = sorted(BODIES)
LIMIT_S = 20
CONTEXT_LENGTH = 2048
LONGEST_TOKEN = 81
"""Characters of the longest token of the packaged model."""

Work = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


def limited(places: int) -> Tenants:
    acme = Tenant("acme", limits=Limits(max_concurrent_requests=places))
    return with_keys((acme, ["a"]), (Tenant("globex"), ["g"]))


def with_client(app: FastAPI, work: Work) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://test"
        ) as client:
            await asyncio.wait_for(work(client), LIMIT_S)

    asyncio.run(run())


async def post(
    client: httpx.AsyncClient, path: str, key: str = "a", body: object = None, **options: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    if "content" not in options:
        options["content"] = json.dumps(BODIES[path] if body is None else body).encode()
    return await client.post(path, headers=headers, **options)


class Gate:
    """In the place of a function: its calls wait, and tell that they do."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, *args: Any, **options: Any) -> Any:
        self.reached.set()
        await self.open.wait()
        return await self._real(*args, **options)


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_that_is_being_tokenized_holds_its_tenants_place(
    lab: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    app = lab.app(lab.says("Hi"), limited(1))
    tokenization = app.state.service.tokenization

    async def work(client: httpx.AsyncClient) -> None:
        gate = Gate(tokenization.encode)
        monkeypatch.setattr(tokenization, "encode", gate)
        first = asyncio.create_task(post(client, "/v1/tokenize"))
        await gate.reached.wait()
        # Not even read: this body is no JSON.
        for content in (json.dumps(BODIES[path]).encode(), b"{"):
            second = await post(client, path, content=content)
            assert second.status_code == 429
            assert second.json()["error"]["code"] == "concurrency_limit"
            assert second.headers["retry-after"] == "1"
        gate.open.set()
        assert (await post(client, path, "g")).status_code == 200
        assert (await first).status_code == 200
        assert (await post(client, path)).status_code == 200

    with_client(app, work)


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_that_is_being_read_holds_its_tenants_place(lab: Any, path: str) -> None:
    app = lab.app(lab.says("Hi"), limited(1))

    async def work(client: httpx.AsyncClient) -> None:
        reading, rest = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            reading.set()
            await rest.wait()
            yield json.dumps(BODIES[path]).encode()

        first = asyncio.create_task(post(client, path, content=slowly()))
        await reading.wait()
        assert (await post(client, "/v1/tokenize")).status_code == 429
        assert (await post(client, "/v1/tokenize", "g")).status_code == 200
        rest.set()
        assert (await first).status_code == 200

    with_client(app, work)


@pytest.mark.parametrize("path", ROUTES)
def test_a_place_is_given_back_after_any_answer(lab: Any, path: str) -> None:
    app = lab.app(lab.says("Hi"), limited(1))

    async def work(client: httpx.AsyncClient) -> None:
        for body in (None, {"unknown": 1}, None, [], None):
            expected = 200 if body is None else 400
            assert (await post(client, path, body=body)).status_code == expected
        assert (await post(client, path, content=b"")).status_code == 400
        await app.state.service.admissions.idle()

    with_client(app, work)


def test_each_text_of_a_request_takes_a_place_before_any_is_tokenized(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = lab.app(lab.says("Hi"), limited(3))
    tokenization = app.state.service.tokenization

    async def work(client: httpx.AsyncClient) -> None:
        gate = Gate(tokenization.encode)
        monkeypatch.setattr(tokenization, "encode", gate)
        path = "/v1/completions"
        first = asyncio.create_task(post(client, path, body={"prompt": ["x", "y"]}))
        await gate.reached.wait()
        gate.open.set()
        second = await post(client, path, body={"prompt": "x", "n": 2})
        assert second.status_code == 429
        assert "2 requests in flight and asks for 2 more" in second.json()["error"]["message"]
        assert (await first).status_code == 200
        assert (await post(client, path, body={"prompt": "x", "n": 3})).status_code == 200
        assert (await post(client, path, body={"prompt": "x", "n": 4})).status_code == 400

    with_client(app, work)


@pytest.mark.parametrize("path", ROUTES)
def test_a_server_that_drains_reads_nothing_more(lab: Any, path: str) -> None:
    app = lab.app(lab.says("Hi"), limited(1))

    async def work(client: httpx.AsyncClient) -> None:
        assert (await post(client, path)).status_code == 200
        app.state.service.admissions.drain()
        for content in (json.dumps(BODIES[path]).encode(), b"{"):
            response = await post(client, path, content=content)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "draining"
            assert int(response.headers["retry-after"]) > 0

    with_client(app, work)


def test_the_engines_client_that_drains_says_when_to_try_again() -> None:
    request = Request(
        request_id=1,
        namespace=Namespace(tenant="t", cache_salt=None, extra_key=None, adapter=None),
        prompt=pack([500]),
        sampling=SamplingParams(max_tokens=1),
    )

    async def work() -> EngineError:
        client = EngineClient()
        try:
            await client.on_supervisor_message(Drain())
            with pytest.raises(EngineError) as caught:
                await anext(client.stream(request))
            return caught.value
        finally:
            await client.close()

    error = asyncio.run(work())
    assert (error.code, error.retry_after) == ("draining", 5)


def test_tokenizing_waits_for_no_other_work_of_the_process(lab: Any) -> None:
    app = lab.app(lab.says("Hi"), limited(1))

    async def work(client: httpx.AsyncClient) -> None:
        release = threading.Event()
        # More than the default executor has threads.
        others = [asyncio.create_task(asyncio.to_thread(release.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        try:
            text = "word " * INLINE_CHARACTERS
            response = await post(client, "/v1/tokenize", body={"prompt": text})
            assert response.json()["tokens"] == lab.ids(text)
        finally:
            release.set()
            await asyncio.gather(*others)

    with_client(app, work)


def test_tokenizing_has_few_threads(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def template(*_args: object, **_options: object) -> str:
        names.append(threading.current_thread().name)
        return "Hello"

    monkeypatch.setattr(lab.tokenizer, "apply_chat_template", template)
    app = lab.app(lab.says("Hi"), limited(50))
    body = {"messages": [{"role": "user", "content": "x" * INLINE_CHARACTERS}]}

    async def work(client: httpx.AsyncClient) -> None:
        answers = [post(client, "/v1/chat/completions", body=body) for _ in range(20)]
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}

    with_client(app, work)
    assert len(names) == 20
    assert all(name.startswith("tokenizing") for name in names)
    assert len(set(names)) <= THREADS


def test_the_texts_of_batches_let_others_have_their_turn(lab: Any) -> None:
    tokenization = Tokenization(lab.tokenizer)
    ended: list[str] = []

    async def encode(name: str, texts: list[str]) -> None:
        encoded = await tokenization.encode(texts, add_special_tokens=False)
        assert encoded == [lab.ids(texts[0])] * len(texts)
        ended.append(name)

    async def work() -> None:
        long = "word " * INLINE_CHARACTERS
        batches = [encode(f"batch {place}", [long] * 20) for place in range(THREADS + 1)]
        await asyncio.wait_for(asyncio.gather(*batches, encode("one", [long])), LIMIT_S)

    asyncio.run(work())
    assert ended[0] == "one"


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/tokenize", "prompt"),
        ("/v1/completions", "prompt"),
        ("/v1/tokenize", "messages[0].content"),
        ("/v1/chat/completions", "messages[0].content"),
    ],
)
def test_a_text_that_can_never_fit_is_not_tokenized(
    lab: Any, monkeypatch: pytest.MonkeyPatch, path: str, param: str
) -> None:
    app = lab.app(lab.says("Hi"), limited(1))

    async def never(*_args: object, **_options: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(app.state.service.tokenization, "encode", never)
    text = "x" * (CONTEXT_LENGTH * LONGEST_TOKEN + 1)
    body: dict[str, object] = {"prompt": text}
    if param != "prompt":
        body = {"messages": [{"role": "user", "content": text}]}

    async def work(client: httpx.AsyncClient) -> None:
        response = await post(client, path, body=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param
        for number in (len(text), len(text) - 1, CONTEXT_LENGTH, LONGEST_TOKEN):
            assert str(number) in error["message"]

    with_client(app, work)


def test_a_text_at_the_limit_is_tokenized(lab: Any) -> None:
    body = {"prompt": "x" * (CONTEXT_LENGTH * LONGEST_TOKEN)}
    assert lab.post(lab.says("Hi"), "/v1/tokenize", body).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/tokenize"])
@pytest.mark.parametrize("content", ["", [{"type": "text", "text": ""}]])
def test_more_messages_than_the_context_has_tokens_are_not_rendered(
    lab: Any, path: str, content: Any
) -> None:
    most = CONTEXT_LENGTH // (1 + len(content))
    message = {"role": "user", "content": content}
    response = lab.post(lab.says("Hi"), path, {"messages": [message] * (most + 1)})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert f"the limit for both together is {CONTEXT_LENGTH}" in error["message"]
    response = lab.post(lab.says("Hi"), "/v1/tokenize", {"messages": [message] * most})
    assert response.status_code == 200


def test_a_tokenizer_that_may_drop_characters_has_a_limit_too(lab: Any) -> None:
    backend = Tokenizer(models.WordLevel({"word": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.normalizer = normalizers.NFKC()
    backend.decoder = decoders.Fuse()
    tokenization = Tokenization(PreTrainedTokenizerFast(tokenizer_object=backend))
    info = lab.says("Hi").info
    limit = CONTEXT_LENGTH * len("<unk>")
    tokenization.check_length("x" * limit, info, "prompt")
    with pytest.raises(ApiError, match=f"prompt has {limit + 1} characters"):
        tokenization.check_length("x" * (limit + 1), info, "prompt")
