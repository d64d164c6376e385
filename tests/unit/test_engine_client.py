from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from ktserve.api.engine_client import EngineClient, EngineError
from ktserve.ipc import GREETING_ID, engine_address
from ktserve.messages import (
    Abort,
    Drain,
    EngineInfo,
    EngineLost,
    EngineReady,
    EngineStats,
    PublicPrefix,
    Request,
    RequestFailed,
    SamplingParams,
    StepOutput,
    TenantCache,
    ToEngine,
    TokenOutput,
)
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import pack

LIMIT_S = 5

INFO = EngineInfo(
    model="m",
    architecture="A",
    device="cpu",
    dtype="float32",
    attention_backend="torch",
    context_length=8,
    page_size=1,
    pool_tokens=8,
    capacity_tokens={},
    kv_bytes_per_token=1,
    weight_bytes=1,
    vocab_size=8,
    eos_token_ids=(0,),
    max_running_requests=1,
    max_queued_requests=1,
)


def stats(generated: int = 0) -> EngineStats:
    return EngineStats(
        running=0,
        queued=0,
        pages_total=1,
        pages_free=1,
        pages_evictable=0,
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=generated,
        evicted_tokens=0,
        preemptions=0,
        invariant_breaches=0,
    )


def request(client: EngineClient) -> Request:
    return Request(
        request_id=client.next_request_id(),
        namespace=Namespace(tenant="t", cache_salt=None, extra_key=None, adapter=None),
        prompt=pack([1]),
        sampling=SamplingParams(max_tokens=4),
    )


def token(request: Request, token_id: int, *, last: bool = False) -> TokenOutput:
    return TokenOutput(
        request_id=request.request_id, token_ids=[token_id], finish="stop" if last else None
    )


class Engine:
    """The engine's socket, moved by hand."""

    def __init__(self, runtime_dir: Path, boot: str) -> None:
        self.ready = EngineReady(boot=boot, endpoint=engine_address(runtime_dir, boot), info=INFO)
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(self.ready.endpoint)
        self.peer = b""

    async def receive(self) -> ToEngine:
        self.peer, payload = await asyncio.wait_for(self.socket.recv_multipart(), LIMIT_S)
        return msgspec.msgpack.decode(payload, type=ToEngine)

    async def greeted(self) -> None:
        assert await self.receive() == Abort(request_id=GREETING_ID)

    async def send(self, *outputs: TokenOutput | RequestFailed, generated: int = 0) -> None:
        step = StepOutput(outputs=list(outputs), stats=stats(generated))
        await self.send_bytes(msgspec.msgpack.encode(step))

    async def send_bytes(self, payload: bytes) -> None:
        await self.socket.send_multipart([self.peer, payload])

    async def hears_only(self, client: EngineClient, *expected: ToEngine) -> None:
        """What the client has sent is ``expected``: a marker sent after it comes next."""
        marker = request(client)
        stream = client.stream(marker)
        first = asyncio.create_task(anext(stream))
        heard = []
        while (message := await self.receive()) != marker:
            heard.append(message)
        assert heard == list(expected)
        await self.send(token(marker, 0, last=True))
        await asyncio.wait_for(first, LIMIT_S)
        await stream.aclose()

    def lost(self) -> EngineLost:
        return EngineLost(boot=self.ready.boot, reason="it was killed by SIGKILL")


@contextlib.asynccontextmanager
async def connected(runtime_dir: Path) -> AsyncIterator[tuple[EngineClient, Engine]]:
    client = EngineClient()
    engine = Engine(runtime_dir, "00")
    try:
        await client.on_supervisor_message(engine.ready)
        await engine.greeted()
        yield client, engine
    finally:
        await client.close()
        engine.context.destroy(linger=0)


Test = Callable[[EngineClient, Engine], Awaitable[None]]


def run(runtime_dir: Path, test: Test) -> None:
    async def body() -> None:
        async with connected(runtime_dir) as (client, engine):
            await asyncio.wait_for(test(client, engine), 4 * LIMIT_S)

    asyncio.run(body())


def begin(client: EngineClient, wanted: Request) -> asyncio.Task[list[int]]:
    async def tokens() -> list[int]:
        return [output.token_ids[0] async for output in client.stream(wanted)]

    return asyncio.create_task(tokens())


async def failure(task: asyncio.Task[list[int]]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(task, LIMIT_S)
    return caught.value


def test_outputs_reach_their_own_streams_in_order(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        one, other = request(client), request(client)
        streams = [begin(client, one), begin(client, other)]
        assert await engine.receive() == one
        assert await engine.receive() == other
        assert client.in_flight == 2
        await engine.send(token(one, 1), token(other, 7), generated=2)
        await engine.send(token(other, 8, last=True), token(one, 2))
        await engine.send(token(one, 3, last=True), generated=5)
        assert await asyncio.gather(*streams) == [[1, 2, 3], [7, 8]]
        assert client.in_flight == 0
        assert client.stats == stats(5)
        await engine.hears_only(client)

    run(socket_dir, test)


def test_failed_request_raises_what_the_engine_said(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        wanted = request(client)
        stream = begin(client, wanted)
        await engine.receive()
        await engine.send(
            RequestFailed(
                request_id=wanted.request_id,
                status=429,
                code="queue_full",
                message="full",
                retry_after=3,
            )
        )
        error = await failure(stream)
        assert (error.status, error.code, error.message, error.retry_after) == (
            429,
            "queue_full",
            "full",
            3,
        )
        await engine.hears_only(client)

    run(socket_dir, test)


@pytest.mark.parametrize("how", ["aclose", "cancel"])
def test_stream_closed_early_aborts_once(socket_dir: Path, how: str) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        wanted = request(client)
        stream = client.stream(wanted)
        first = asyncio.create_task(anext(stream))
        await engine.receive()
        if how == "cancel":
            first.cancel()
            await asyncio.wait([first])
        else:
            await engine.send(token(wanted, 1))
            assert (await first).token_ids == [1]
            await stream.aclose()
        await stream.aclose()
        assert client.in_flight == 0
        await engine.hears_only(client, Abort(request_id=wanted.request_id))

    run(socket_dir, test)


def test_stream_closed_after_its_last_output_came_does_not_abort(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        wanted = request(client)
        stream = client.stream(wanted)
        first = asyncio.create_task(anext(stream))
        await engine.receive()
        await engine.send(token(wanted, 1), token(wanted, 2, last=True))
        assert (await first).token_ids == [1]
        await stream.aclose()
        await engine.hears_only(client)

    run(socket_dir, test)


def test_stream_that_is_never_read_sends_nothing(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        await client.stream(request(client)).aclose()
        assert client.in_flight == 0
        await engine.hears_only(client)

    run(socket_dir, test)


def test_outputs_of_unknown_requests_are_ignored(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        wanted = request(client)
        stream = begin(client, wanted)
        await engine.receive()
        await engine.send(
            TokenOutput(request_id=999, token_ids=[5], finish="stop"),
            RequestFailed(request_id=998, status=500, code="c", message="m"),
            token(wanted, 1, last=True),
        )
        assert await stream == [1]

    run(socket_dir, test)


def test_lost_engine_fails_what_is_in_flight_and_the_next_one_serves(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        streams = [begin(client, request(client)) for _ in range(3)]
        for _ in streams:
            await engine.receive()
        await client.on_supervisor_message(engine.lost())
        for stream in streams:
            error = await failure(stream)
            assert (error.status, error.code) == (503, "engine_lost")
            assert "SIGKILL" in error.message
            assert error.retry_after is not None
        assert (client.info, client.stats, client.in_flight) == (None, None, 0)
        error = await failure(begin(client, request(client)))
        assert (error.status, error.code) == (503, "engine_unavailable")

        following = Engine(socket_dir, "01")
        await client.on_supervisor_message(following.ready)
        assert client.info == INFO
        await following.greeted()
        assert following.peer == engine.peer, "the identity lasts as long as the API process"
        # The first engine's end may be reported late, and concerns the first alone.
        await client.on_supervisor_message(engine.lost())
        wanted = request(client)
        stream = begin(client, wanted)
        assert await following.receive() == wanted
        await following.send(token(wanted, 1, last=True))
        assert await stream == [1]
        following.context.destroy(linger=0)

    run(socket_dir, test)


def test_tenants_counters_go_on_with_the_next_engine(socket_dir: Path) -> None:
    def told(lookups: int) -> bytes:
        counts = dict.fromkeys(TenantCache.__struct_fields__, 0)
        row = TenantCache(**{**counts, "name": "t", "lookups": lookups, "evicted_by": {}})
        tenants = msgspec.structs.replace(stats(), tenants=(row,))
        return msgspec.msgpack.encode(StepOutput(outputs=[], stats=tenants))

    async def test(client: EngineClient, engine: Engine) -> None:
        await engine.send_bytes(told(3))
        await engine.send_bytes(told(5))
        await engine.hears_only(client)
        assert client.tenants.totals["t"].lookups == 5
        assert client.tenants.now["t"].lookups == 5
        await client.on_supervisor_message(engine.lost())
        assert client.tenants.totals["t"].lookups == 5
        assert client.tenants.now == {}
        following = Engine(socket_dir, "01")
        await client.on_supervisor_message(following.ready)
        await following.greeted()
        await following.send_bytes(told(7))
        await following.hears_only(client)
        assert client.tenants.totals["t"].lookups == 12
        following.context.destroy(linger=0)

    run(socket_dir, test)


def test_outputs_that_came_before_the_loss_are_delivered_first(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        wanted, other = request(client), request(client)
        stream = client.stream(wanted)
        first = asyncio.create_task(anext(stream))
        watch = begin(client, other)
        await engine.receive()
        await engine.receive()
        await engine.send(token(wanted, 1), token(wanted, 2), token(other, 1, last=True))
        assert await watch == [1]
        await client.on_supervisor_message(engine.lost())
        assert (await first).token_ids == [1]
        assert (await anext(stream)).token_ids == [2]
        with pytest.raises(EngineError):
            await anext(stream)

    run(socket_dir, test)


def test_repeated_ready_changes_nothing(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        wanted = request(client)
        stream = begin(client, wanted)
        await engine.receive()
        await client.on_supervisor_message(engine.ready)
        await engine.send(token(wanted, 1, last=True))
        assert await stream == [1]

    run(socket_dir, test)


def test_drain_refuses_new_streams_and_waits_for_the_others(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        await client.drained()
        wanted = request(client)
        stream = begin(client, wanted)
        await engine.receive()
        await client.on_supervisor_message(Drain())
        error = await failure(begin(client, request(client)))
        assert (error.status, error.code) == (503, "draining")
        drained = asyncio.create_task(client.drained())
        await engine.send(token(wanted, 1), token(wanted, 2, last=True))
        assert await stream == [1, 2]
        await asyncio.wait_for(drained, LIMIT_S)

    run(socket_dir, test)


def test_drained_is_not_done_while_a_stream_is_in_flight(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        stream = begin(client, request(client))
        await engine.receive()
        drained = asyncio.create_task(client.drained())
        assert not (await asyncio.wait([drained], timeout=0.05))[0]
        stream.cancel()
        await asyncio.wait_for(drained, LIMIT_S)

    run(socket_dir, test)


def test_unreadable_message_fails_streams_and_is_not_the_end(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        stream = begin(client, request(client))
        await engine.receive()
        await engine.send_bytes(b"\xc1")
        assert (await failure(stream)).status == 500
        assert isinstance(await engine.receive(), Abort)
        wanted = request(client)
        stream = begin(client, wanted)
        assert await engine.receive() == wanted
        await engine.send(token(wanted, 1, last=True))
        assert await stream == [1]

    run(socket_dir, test)


def test_every_engine_is_told_of_public_prefixes_before_requests(socket_dir: Path) -> None:
    prefixes = [
        PublicPrefix(name=name, tenants=("t",), prompt=pack([1, 2])) for name in ("one", "two")
    ]

    async def test(client: EngineClient, engine: Engine) -> None:
        client.publish(prefixes)
        await engine.hears_only(client, *prefixes)
        successor = Engine(socket_dir, "01")
        try:
            await client.on_supervisor_message(engine.lost())
            await client.on_supervisor_message(successor.ready)
            await successor.greeted()
            await successor.hears_only(client, *prefixes)
            await client.on_supervisor_message(successor.ready)  # said twice
            await successor.hears_only(client)
        finally:
            successor.context.destroy(linger=0)

    run(socket_dir, test)


def test_prefixes_that_are_known_before_an_engine_wait_for_it(socket_dir: Path) -> None:
    prefix = PublicPrefix(name="one", tenants=("t",), prompt=pack([1, 2]))

    async def test() -> None:
        client, engine = EngineClient(), Engine(socket_dir, "00")
        try:
            client.publish([prefix])
            await client.on_supervisor_message(engine.ready)
            await engine.greeted()
            await engine.hears_only(client, prefix)
        finally:
            await client.close()
            engine.context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(test(), 4 * LIMIT_S))


def test_close_fails_what_is_in_flight(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        stream = begin(client, request(client))
        await engine.receive()
        await client.close()
        assert (await failure(stream)).status == 503

    run(socket_dir, test)


def test_each_client_has_an_identity_of_its_own(socket_dir: Path) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        first = engine.peer
        other = EngineClient()
        await other.on_supervisor_message(engine.ready)
        await engine.greeted()
        assert engine.peer != first
        assert client.in_flight == 0
        await other.close()

    run(socket_dir, test)
