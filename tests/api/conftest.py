"""An application with the packaged model's tokenizer and an engine that follows a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from ktserve.api.__main__ import bind, uvicorn_config
from ktserve.api.app import create_app
from ktserve.api.engine_client import EngineError
from ktserve.api.tenant_totals import TenantTotals
from ktserve.config import Settings
from ktserve.messages import EngineInfo, EngineStats, Request, TokenLogprobs, TokenOutput
from ktserve.models.source import resolve
from ktserve.models.tokenizer import load_tokenizer
from ktserve.tenancy.tenants import Tenants, load_roster

MODEL = "tiny"
EOS = 2
INFO = EngineInfo(
    model="packaged",
    architecture="LlamaForCausalLM",
    device="cpu",
    dtype="float32",
    attention_backend="torch",
    context_length=2048,
    page_size=1,
    pool_tokens=4096,
    capacity_tokens={},
    kv_bytes_per_token=100,
    weight_bytes=1000,
    vocab_size=49152,
    eos_token_ids=(EOS,),
    max_running_requests=8,
    max_queued_requests=8,
)
STATS = EngineStats(
    running=1,
    queued=2,
    pages_total=100,
    pages_free=60,
    pages_evictable=30,
    prompt_tokens=11,
    cached_tokens=12,
    generated_tokens=13,
    evicted_tokens=14,
    preemptions=0,
    invariant_breaches=0,
)

Event = TokenOutput | EngineError | asyncio.Event
Script = Callable[[Request], Sequence[Event]]


@dataclass
class ScriptedEngine:
    """An engine whose answers are known beforehand.

    Attributes:
        script: what happens to a request; an `asyncio.Event` is waited for.
        requests: all that were sent, in order.
        aborted: the ids of those whose stream was closed before its end.
    """

    script: Script
    info: EngineInfo | None = INFO
    stats: EngineStats | None = STATS
    tenants: TenantTotals = field(default_factory=TenantTotals)
    requests: list[Request] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    last_id: int = 0

    def next_request_id(self) -> int:
        self.last_id += 1
        return self.last_id

    async def stream(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
        finished = False
        try:
            for event in self.script(request):
                if isinstance(event, asyncio.Event):
                    await event.wait()
                elif isinstance(event, EngineError):
                    finished = True
                    raise event
                else:
                    finished = event.finish is not None
                    yield msg(request, event)
        finally:
            if not finished:
                with self.changed:
                    self.aborted.append(request.request_id)
                    self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Block until ``condition`` holds, for a server in another thread."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout=10), "the engine never got there"


def msg(request: Request, output: TokenOutput) -> TokenOutput:
    return TokenOutput(
        request_id=request.request_id,
        token_ids=output.token_ids,
        cached_tokens=output.cached_tokens,
        logprobs=output.logprobs,
        finish=output.finish,
        stopped_by_token=output.stopped_by_token,
    )


def tokens(
    ids: Sequence[int], *, finish: Any = "stop", cached: int = 0, logprobs: bool = False
) -> list[Event]:
    """One output for each of ``ids``; with finish "stop" an end-of-sequence token follows."""
    ids = [*ids, EOS] if finish == "stop" else list(ids)
    report = TokenLogprobs(logprob=-0.5, top=[(ids[0], -0.5), (3, float("-inf"))])
    outputs: list[Event] = []
    for place, token_id in enumerate(ids):
        last = place == len(ids) - 1
        outputs.append(
            TokenOutput(
                request_id=0,
                token_ids=[token_id],
                cached_tokens=cached if place == 0 else None,
                logprobs=[report] if logprobs else None,
                finish=finish if last else None,
                stopped_by_token=last and finish == "stop",
            )
        )
    return outputs


@dataclass
class Lab:
    """What the tests of the API build with."""

    tokenizer: PreTrainedTokenizerFast

    def ids(self, text: str) -> list[int]:
        """The token ids of ``text``."""
        encoded: list[int] = self.tokenizer.backend_tokenizer.encode(
            text, add_special_tokens=False
        ).ids
        return encoded

    def says(self, text: str, **options: Any) -> ScriptedEngine:
        """An engine that answers ``text`` to everything."""

        def script(request: Request) -> Sequence[Event]:
            wants = request.sampling.logprobs is not None
            return tokens(self.ids(text), logprobs=wants, **options)

        return ScriptedEngine(script)

    def app(
        self,
        engine: ScriptedEngine,
        tenants: Tenants | None = None,
        **settings: Any,
    ) -> FastAPI:
        """The application."""
        chosen = Settings(**settings)
        return create_app(
            chosen,
            engine,
            self.tokenizer,
            tenants or Tenants(load_roster(chosen)),
            b"key" * 10,
            MODEL,
        )

    def post(
        self, engine: ScriptedEngine, path: str, body: Any = None, **options: Any
    ) -> httpx.Response:
        """One POST to a fresh application."""
        return _call(self.app(engine, **options), "POST", path, json=body)


def _call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to ``app``, without a network; a bug in it is raised here."""

    async def work() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://test"
        ) as client:
            return await client.request(method, path, **options)

    return asyncio.run(work())


@contextmanager
def _served(app: FastAPI, **settings: Any) -> Iterator[str]:
    """``app`` behind a real uvicorn on a free port; gives its URL."""
    chosen = replace(Settings(port=0), **settings)
    with bind(chosen) as listening:
        server = uvicorn.Server(uvicorn_config(app, chosen))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """The packaged model's."""
    source = resolve(
        None, "dummy", None, tmp_path_factory.mktemp("cache"), lambda _done, _all: None
    )
    assert source.directory is not None
    return load_tokenizer(source.directory)


@pytest.fixture
def lab(tokenizer: PreTrainedTokenizerFast) -> Lab:
    return Lab(tokenizer)


def _post_many(app: FastAPI, path: str, bodies: Sequence[bytes]) -> list[httpx.Response]:
    async def work() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://test"
        ) as client:
            return [
                await client.post(path, content=body, headers={"content-type": "application/json"})
                for body in bodies
            ]

    return asyncio.run(work())


@pytest.fixture
def post_many() -> Callable[..., list[httpx.Response]]:
    """Many bodies posted to one application, one after the other."""
    return _post_many


@pytest.fixture
def call() -> Callable[..., httpx.Response]:
    """One request to an application, without a network."""
    return _call


@pytest.fixture
def served() -> Callable[..., AbstractContextManager[str]]:
    """An application behind a real server on a free port, as a context manager of its URL."""
    return _served
