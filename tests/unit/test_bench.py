"""The load generator, against a small OpenAI-like server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from typer.testing import CliRunner

from ktserve.bench.prompts import WORDS, Sizing, fresh, measure_sizing
from ktserve.bench.results import Results
from ktserve.bench.serve import Plan, Server, measure
from ktserve.bench.sse import data_lines
from ktserve.bench.target import (
    Prompt,
    RequestFailed,
    Sample,
    Target,
    TargetError,
    is_loopback,
)
from ktserve.bench.workloads import Figure, Shape, Workload, decode, shared_prefix
from ktserve.cli import bench
from ktserve.cli.exit_codes import ExitCode

TEMPLATE_TOKENS = 10

T = TypeVar("T")


@dataclass
class FakeServer:
    """Answers as an OpenAI server does, one word a token, and remembers prompts as a cache would.

    Attributes:
        refuses: body fields that get a 422.
        reports: usage is sent, and in it the cached tokens.
        failing: of the requests to a completion, those (from 0) that get a 500.
        broken: how a stream goes wrong: "error", "cut", "garbage".
        silent_from: from this request on (from 0) no stream ever begins; `stuck` says so.
        together: an answer begins only when that many requests are there.
        key: the API key it asks for.
    """

    refuses: tuple[str, ...] = ()
    reports: bool = True
    tokenizes: bool = False
    failing: range = range(0)
    broken: str = ""
    silent_from: int | None = None
    together: asyncio.Barrier | None = None
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _now: int = 0
    _cache: set[str] = field(default_factory=set)
    stuck: threading.Event = field(default_factory=threading.Event)

    async def __call__(
        self,
        path: str,
        headers: dict[str, str],
        body: bytes,
        send: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self.keys.append(headers.get("authorization"))
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            await send(_response(401, {"error": {"message": "who?"}}))
        elif path == "/v1/models":
            await send(_response(200, {"data": [{"id": "fake\x1b[2J", "owned_by": "me"}]}))
        elif path == "/v1/tokenize" and self.tokenizes:
            count = len(json.loads(body)["prompt"].split()) * 2
            await send(_response(200, {"count": count}))
        elif path in ("/v1/chat/completions", "/v1/completions"):
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            try:
                await self._complete(json.loads(body), send)
            finally:
                self._now -= 1
        else:
            await send(_response(404, {"error": {"message": "no such path"}}))

    async def _complete(
        self, body: dict[str, Any], send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        unknown = [name for name in self.refuses if name in body]
        if unknown:
            await send(_response(422, {"detail": f"unexpected {unknown}"}))
            return
        if number in self.failing:
            await send(_response(500, {"error": {"message": "out of luck\x1b[2J"}}))
            return
        if self.silent_from is not None and number >= self.silent_from:
            self.stuck.set()
            await asyncio.Event().wait()
        if self.together is not None:
            await self.together.wait()
        await send(_HEAD)
        chat = "messages" in body
        if chat:
            await send(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for index in range(body["max_tokens"]):
            await asyncio.sleep(0)
            word = f"w{index}\u2028 "
            choice = {"delta": {"content": word}} if chat else {"text": word}
            await send(_event({"choices": [choice]}))
            if self.broken == "error":
                await send(_event({"error": {"message": "lost"}}))
                return
            if self.broken == "cut":
                await send(_END)
                return
            if self.broken == "garbage":
                await send(_chunk(b"data: {\n\n"))
                return
        last: dict[str, Any] = {"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]}
        if self.reports:
            last["usage"] = self._usage(body)
        await send(_event(last) + _chunk(b"data: [DONE]\n\n") + _END)

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        messages = body.get("messages") or [{"content": body.get("prompt")}]
        known = 0
        for message in messages:
            if message["content"] in self._cache:
                known += len(message["content"].split())
            self._cache.add(message["content"])
        words = sum(len(message["content"].split()) for message in messages)
        return {
            "prompt_tokens": words + TEMPLATE_TOKENS,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": known},
        }


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(value: object) -> bytes:
    return _chunk(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")


def _response(status: int, value: object) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def serving(fake: FakeServer) -> AsyncIterator[str]:
    open_connections: set[asyncio.Task[None]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_connections.add(task)

        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                _, path, _ = head[0].split(" ")
                pairs = (line.split(": ", 1) for line in head[1:] if line)
                headers = {name.lower(): value for name, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await fake(path, headers, body, send)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:
            # The end of the test; asyncio would report a cancelled handler as a fault.
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake.url
    finally:
        server.close()
        for task in open_connections:
            task.cancel()
        await asyncio.gather(*open_connections)


@pytest.fixture
def threaded() -> Iterator[Callable[[FakeServer], str]]:
    """Serves from another thread, for commands that run an event loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = contextlib.AsyncExitStack()

    def start(fake: FakeServer) -> str:
        entering = stack.enter_async_context(serving(fake))
        return asyncio.run_coroutine_threadsafe(entering, loop).result(10)

    try:
        yield start
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


SMALL = Shape(
    prompt_tokens=100,
    first_tokens=2,
    concurrency=(1, 3),
    output_tokens=8,
    decode_prompt_tokens=20,
    systems=2,
    users=4,
    system_tokens=60,
    question_tokens=12,
    shared_output_tokens=3,
    shared_at_once=4,
)


def plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "workloads": ("ttft", "decode", "shared"),
        "runs": 2,
        "shape": SMALL,
        "endpoint": "chat",
        "time_limit": 60.0,
        "request_timeout": 10.0,
    }
    return Plan(**{**fields, **changes})


def measured(fakes: list[FakeServer], the_plan: Plan) -> Results:
    results = Results(tuple("AB"[: len(fakes)]))

    async def work() -> None:
        async with contextlib.AsyncExitStack() as stack:
            servers = [
                Server(
                    label=label,
                    url=await stack.enter_async_context(serving(fake)),
                    api_key=fake.key,
                )
                for label, fake in zip("AB", fakes, strict=False)
            ]
            await measure(servers, the_plan, results, lambda _: None)

    asyncio.run(work())
    return results


def figures(results: Results) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["name"], each["target"]): each for each in results.document()["figures"]}


def target(url: str, client: httpx.AsyncClient, **changes: Any) -> Target:
    fields: dict[str, Any] = {"label": "A", "endpoint": "chat", "model": "m", "extra": {}}
    return Target(url=url, client=client, **{**fields, **changes})


def asked(fake: FakeServer, question: Callable[[Target], Awaitable[T]], **changes: Any) -> T:
    async def work() -> T:
        async with serving(fake) as url, httpx.AsyncClient(base_url=url) as client:
            return await question(target(url, client, **changes))

    return asyncio.run(work())


def decode_x3(shape: Shape, sizing: Sizing, rng: random.Random) -> Workload:
    return decode(shape, 3, sizing, rng)


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "sent": 10.0, "first": 10.5, "last": 12.5, "output_tokens": 9, "prompt_tokens": 5,
        "cached_tokens": 0, "counted": True,
    }  # fmt: skip
    return Sample(**{**fields, **changes})


# One request


def test_a_sample_gives_first_token_time_and_decode_rate() -> None:
    assert sample().time_to_first_token == 0.5
    assert sample().decode_rate == 4.0


@pytest.mark.parametrize("changes", [{"output_tokens": 1}, {"last": 10.5}])
def test_a_rate_that_cannot_be_told_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestFailed, match="--output-tokens"):
        _ = sample(**changes).decode_rate


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_is_timed_from_its_first_text_to_its_last(endpoint: str) -> None:
    ticks = iter(range(100))
    got = asked(
        FakeServer(),
        lambda t: t.stream(Prompt("one two", "three"), 4),
        endpoint=endpoint,
        clock=lambda: float(next(ticks)),
    )
    # The first event of a chat names the role and holds no text.
    first = 2.0 if endpoint == "chat" else 1.0
    assert (got.sent, got.first, got.last) == (0.0, first, first + 4)
    assert (got.output_tokens, got.prompt_tokens, got.cached_tokens) == (4, 13, 0)
    assert got.counted


def test_without_usage_pieces_are_counted() -> None:
    got = asked(FakeServer(reports=False), lambda t: t.stream(Prompt("one"), 4))
    assert (got.output_tokens, got.counted) == (4, False)
    assert (got.prompt_tokens, got.cached_tokens) == (None, None)


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (FakeServer(failing=range(1)), "HTTP 500: .*out of luck"),
        (FakeServer(broken="error"), "ends in an error: .*lost"),
        (FakeServer(broken="cut"), "ended before the answer was finished"),
        (FakeServer(broken="garbage"), "no JSON"),
    ],
)
def test_a_failing_request_says_why(fake: FakeServer, problem: str) -> None:
    with pytest.raises(RequestFailed, match=problem):
        asked(fake, lambda t: t.stream(Prompt("one"), 4))


def test_a_silent_server_is_not_waited_for() -> None:
    async def work() -> None:
        async with (
            serving(FakeServer(silent_from=0)) as url,
            httpx.AsyncClient(base_url=url, timeout=0.05) as client,
        ):
            await target(url, client).stream(Prompt("one"), 4)

    with pytest.raises(RequestFailed, match="--request-timeout"):
        asyncio.run(work())


@pytest.mark.parametrize(
    ("refuses", "accepted"),
    [
        ((), ["ignore_eos", "stream_options"]),
        (("ignore_eos",), ["stream_options"]),
        (("stream_options",), ["ignore_eos"]),
        (("ignore_eos", "stream_options"), []),
    ],
)
def test_optional_fields_are_sent_where_they_are_taken(
    refuses: tuple[str, ...], accepted: list[str]
) -> None:
    async def prepared(t: Target) -> Target:
        await t.prepare()
        await t.stream(Prompt("one"), 4)
        return t

    fake = FakeServer(refuses=refuses)
    got = asked(fake, prepared, model="", extra={"more": 1})
    assert sorted(got.accepted) == accepted
    assert got.model == "fake\x1b[2J"
    last = fake.bodies[-1]
    assert [name for name in ("ignore_eos", "stream_options") if name in last] == accepted
    assert (last["temperature"], last["more"], last["stream"]) == (0, 1, True)


def test_a_server_that_takes_nothing_cannot_be_measured() -> None:
    with pytest.raises(TargetError, match=r"first request failed: HTTP 422.*max_tokens"):
        asked(FakeServer(refuses=("max_tokens",)), Target.prepare)


def test_lines_end_at_newlines_alone() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for part in (
            b": hi\r\nda",
            b"ta: {\xe2\x80\xa8}\r\n\r",
            b"\nevent: x\ndata:2\n",
            b"data: 3",
        ):
            yield part

    async def work() -> list[bytes]:
        return [line async for line in data_lines(chunks())]

    assert asyncio.run(work()) == [b"{\xe2\x80\xa8}", b"2", b"3"]


# Prompts


def test_words_are_many_and_different() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200
    assert all(re.fullmatch("[a-z]+", word) for word in WORDS)


def test_prompts_are_sized_by_what_the_server_counts() -> None:
    sizing = asked(FakeServer(), lambda t: measure_sizing(t, random.Random(0)))
    assert (sizing.per_word, sizing.overhead) == (1.0, TEMPLATE_TOKENS)
    assert sizing.source == "usage.prompt_tokens"
    assert sizing.words(444) == 434
    assert sizing.words(444, template=False) == 444


def test_without_usage_the_tokenizer_is_asked_and_then_guessed() -> None:
    with_route = FakeServer(reports=False, tokenizes=True)
    sizing = asked(with_route, lambda t: measure_sizing(t, random.Random(0)))
    assert (sizing.per_word, sizing.source) == (2.0, "/v1/tokenize")
    sizing = asked(FakeServer(reports=False), lambda t: measure_sizing(t, random.Random(0)))
    assert (sizing.per_word, sizing.source) == (1.0, "guess")


@pytest.mark.parametrize(("words", "system"), [(1, 0), (2, 1), (15, 7), (434, 8)])
def test_a_fresh_prompt_begins_with_its_own_system_text(words: int, system: int) -> None:
    made = fresh(random.Random(0), words)
    assert (len(made.system.split()), len(made.user.split())) == (system, words - system)


def test_a_prompt_has_a_word_at_least() -> None:
    assert Sizing(1.0, 50.0, "test").words(10) == 1


# Workloads


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_workload_gives_its_figures(endpoint: str) -> None:
    fake = FakeServer()
    results = measured([fake], plan(endpoint=endpoint))
    found = figures(results)
    for name in ("ttft cold", "ttft warm", "decode x1", "decode x3", "decode x3 total", "shared"):
        each = found[name, "A"]
        assert len(each["runs"]) == 2
        assert 0 < each["min"] <= each["median"] <= each["max"]
    assert (results.failures, results.stopped) == ([], None)
    assert found["ttft cold prompt", "A"]["median"] == 100
    assert found["decode x3 output", "A"]["median"] == 8
    # Cold prompts were never seen; the same ones again were, but for the template.
    assert found["ttft cold cached", "A"]["max"] == 0
    assert found["ttft warm cached", "A"]["min"] == pytest.approx(0.9)


def test_the_shared_workload_sends_every_question_to_every_system_prompt() -> None:
    fake = FakeServer()
    found = figures(measured([fake], plan(workloads=("shared",), runs=1)))
    pairs = [
        (body["messages"][0]["content"], body["messages"][1]["content"])
        for body in fake.bodies
        if body["max_tokens"] == SMALL.shared_output_tokens
    ]
    assert len(pairs) == len(set(pairs)) == 8
    assert len({system for system, _ in pairs}) == 2
    assert {len(system.split()) for system, _ in pairs} == {60}
    # Of 8 requests 2 were the first with their system prompt.
    assert found["shared cached", "A"]["median"] == pytest.approx(6 * 60 / (8 * (60 + 12 + 10)))


@pytest.mark.parametrize(("make", "at_once"), [(decode_x3, 3), (shared_prefix, 4)])
def test_requests_go_out_together_and_no_more_than_asked_for(
    make: Callable[[Shape, Sizing, random.Random], Workload], at_once: int
) -> None:
    fake = FakeServer(together=asyncio.Barrier(at_once))
    workload = make(SMALL, Sizing(1.0, 0.0, "test"), random.Random(0))
    failures: list[str] = []
    found = asked(fake, lambda t: workload.measure(t, failures.append))
    assert found
    assert not failures
    assert fake.most_at_once == at_once


def test_no_two_runs_share_a_prompt_and_warm_ones_are_the_same() -> None:
    fake = FakeServer()
    measured([fake], plan(workloads=("ttft",), runs=2))
    prompts = [
        " ".join(message["content"] for message in body["messages"])
        for body in fake.bodies
        if body["max_tokens"] == 1
    ]
    timed = prompts[2:]
    assert len(timed) == 8
    assert timed[0::2] == timed[1::2]
    assert len(set(timed)) == 4
    assert len({prompt[:16] for prompt in timed}) == 4


def test_two_servers_get_the_same_prompts_workload_by_workload() -> None:
    fakes = [FakeServer(), FakeServer(reports=False)]
    results = measured(fakes, plan())
    first, second = (
        [body for body in fake.bodies if body["max_tokens"] not in (1, 2)] for fake in fakes
    )
    assert sorted(json.dumps(body["messages"]) for body in first) == sorted(
        json.dumps(body["messages"]) for body in second
    )
    assert {name for name, label in figures(results) if label == "A"} >= {
        name for name, label in figures(results) if label == "B"
    }
    # The second reports no usage: what needs it is left out, not guessed.
    assert ("shared cached", "A") in figures(results)
    assert ("shared cached", "B") not in figures(results)


def test_failures_are_reported_and_their_figures_left_out() -> None:
    # 1 to prepare, 2 to size; then the first request of "decode x1" in the first run.
    fake = FakeServer(failing=range(3, 4))
    results = measured([fake], plan(workloads=("decode",)))
    assert [(f.workload, f.run) for f in results.failures] == [("decode x1", 1)]
    found = figures(results)
    assert len(found["decode x1", "A"]["runs"]) == 1
    assert len(found["decode x3", "A"]["runs"]) == 2
    table = results.table()
    assert "1 failed" in table
    assert "1 x A, decode x1: HTTP 500" in table
    assert "\x1b" not in table


def test_the_time_limit_ends_it_with_what_there_is() -> None:
    results = measured([FakeServer(silent_from=0)], plan(time_limit=0.05))
    assert results.stopped is not None
    assert "--time-limit" in results.table()


# The report


def figure(value: float, **changes: Any) -> Figure:
    fields: dict[str, Any] = {"name": "x", "unit": "s", "better": "less"}
    return Figure(value=value, **{**fields, **changes})


def test_the_table_has_medians_spreads_and_a_ratio_that_is_above_1_when_better() -> None:
    results = Results(("A", "B"))
    for ours, theirs in ((1.0, 4.0), (3.0, 8.0), (2.0, 6.0)):
        results.add("A", [figure(ours), figure(theirs, name="y", unit="tokens/s", better="more")])
        results.add("B", [figure(theirs), figure(ours, name="y", unit="tokens/s", better="more")])
    results.add("A", [figure(0.5, name="z", unit="share", better="more")])
    rows = [re.split(r"\s{2,}", line) for line in results.table().splitlines()]
    assert rows == [
        ["measured", "unit", "A", "B", "A is better by"],
        ["x", "s", "2.000 (1.000..3.000)", "6.000 (4.000..8.000)", "3.00x"],
        ["y", "tokens/s", "6.0 (4.0..8.0)", "2.0 (1.0..3.0)", "3.00x"],
        ["z", "%", "50.0 (50.0..50.0)", "-", "-"],
    ]


# The command


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://127.9.9.9/", True),
        ("http://localhost:1", True),
        ("https://[::1]:1", True),
        ("http://10.0.0.1", False),
        ("http://127.0.0.1.example.com", False),
        ("http://localhost.example.com", False),
        ("http://0.0.0.0", False),
        ("http://2130706433", False),
    ],
)
def test_only_loopback_addresses_are_this_machine(url: str, local: bool) -> None:
    assert is_loopback(url) is local


@pytest.mark.parametrize(
    "url", ["127.0.0.1", "ftp://127.0.0.1", "http://", "http://a:b@127.0.0.1", "http://[::1"]
)
def test_what_is_no_address_is_an_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        is_loopback(url)


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(bench.app, ["serve", *(str(each) for each in arguments)])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--url", "http://10.0.0.1"), "--url: http://10.0.0.1 is not on this machine"),
        (("--vs", "http://example.com"), "--allow-remote"),
        (("--url", "here"), "--url: 'here' is no http:// or https:// address"),
        (("--workload", "ttft,speed"), "--workload"),
        (("--workload", "ttft,ttft"), "--workload"),
        (("--concurrency", "1,x"), "--concurrency"),
        (("--concurrency", "0"), "--concurrency"),
        (("--concurrency", "257"), "--concurrency"),
        (("--endpoint", "embeddings"), "--endpoint"),
        (("--extra-body", "[1]"), "--extra-body"),
        (("--json", "/nowhere/at/all.json"), "--json"),
        (("--runs", "0"), "--runs"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(arguments: tuple[str, ...], problem: str) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert problem in result.stderr


def test_no_server_is_said_plainly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        result = run("--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert result.exit_code == ExitCode.CANNOT_CONNECT
    assert "cannot be reached" in result.stderr


QUICK = ("--workload", "decode", "--concurrency", "2", "--output-tokens", "4", "--runs", "2")


def test_the_command_prints_a_table_and_writes_json_without_the_key(
    threaded: Callable[[FakeServer], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeServer(key="secret-key")
    url = threaded(fake)
    file = tmp_path / "out.json"
    arguments = ["--url", url, "--api-key", "secret-key", *QUICK, "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["ktserve", "bench", "serve", *arguments])
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"^decode x2 +tokens/s +[\d.]+ \([\d.]+\.\.[\d.]+\)$", result.stdout, re.M)
    assert "\x1b" not in result.output
    written = file.read_text()
    assert "secret-key" not in written + result.output
    document = json.loads(written)
    assert document["command"].startswith(f"ktserve bench serve --url {url} --api-key '***'")
    assert {"versions", "machine", "started", "plan", "found", "figures"} <= set(document)
    assert document["found"]["A"]["reported"]["models"][0]["owned_by"] == "me"
    assert document["plan"]["shape"]["output_tokens"] == 4
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_a_wrong_key_and_a_failure_have_their_exit_codes(
    threaded: Callable[[FakeServer], str],
) -> None:
    refused = run("--url", threaded(FakeServer(key="right")), "--api-key", "wrong")
    assert refused.exit_code == ExitCode.CANNOT_CONNECT
    assert "refuses the API key" in refused.stderr
    failed = run("--url", threaded(FakeServer(failing=range(3, 4))), *QUICK)
    assert failed.exit_code == ExitCode.CHECK_FAILED
    assert "1 failed" in failed.stdout


def test_ctrl_c_prints_what_there_is(threaded: Callable[[FakeServer], str]) -> None:
    # 1 to prepare, 2 to size, 2 in the first run; the second run hangs.
    fake = FakeServer(silent_from=5)
    code = "from ktserve.cli.bench import app; app()"
    command = [sys.executable, "-c", code, "serve", "--url", threaded(fake), *QUICK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert fake.stuck.wait(30)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == ExitCode.INCONCLUSIVE, err.decode()
    assert "Stopped early: interrupted." in out.decode()
    assert re.search(r"^decode x2 +tokens/s +[\d.]+", out.decode(), re.M)
    assert b"Traceback" not in err
