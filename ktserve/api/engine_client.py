"""How the API process sends requests to the engine and hears of their tokens."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterable

import msgspec
import zmq
import zmq.asyncio

from ktserve.api.tenant_totals import TenantTotals
from ktserve.ipc import GREETING_ID, configure_socket, new_api_identity, send_now
from ktserve.messages import (
    Abort,
    Drain,
    EngineInfo,
    EngineLost,
    EngineReady,
    EngineStats,
    FromEngine,
    FromSupervisor,
    PublicPrefix,
    Request,
    RequestFailed,
    ToEngine,
    TokenOutput,
)

RETRY_AFTER_S = 5
"""What a client is told to wait for an engine, or a server, that is being (re)started."""

log = logging.getLogger(__name__)


class EngineError(Exception):
    """A request that the engine did not, or will not, complete.

    Attributes:
        status: the HTTP status that says so: 400, 429, 500 or 503.
        code: a stable word for programs.
        message: for people; holds no prompt, key or salt.
        retry_after: seconds after which another try makes sense.
    """

    def __init__(self, status: int, code: str, message: str, retry_after: int | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after


class EngineClient:
    """The API process's only way to the engine; lives as long as the process.

    It must be made and used inside one running asyncio loop.

    Attributes:
        info: what the ready engine told of itself; None while there is none.
        stats: the newest counters; None until the ready engine has sent some.
        tenants: the tenants' counters, over all lives of the engine.
        in_flight: streams that were begun and have not ended.
    """

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.tenants = TenantTotals()
        self.in_flight = 0
        self._identity = new_api_identity()
        self._context = zmq.asyncio.Context()
        self._connection: _Connection | None = None
        self._request_ids = itertools.count(GREETING_ID + 1)
        self._public: tuple[PublicPrefix, ...] = ()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def next_request_id(self) -> int:
        """An id that no request of this process had before."""
        return next(self._request_ids)

    def publish(self, prefixes: Iterable[PublicPrefix]) -> None:
        """Tell of public prefixes: the ready engine now, and every later one before requests."""
        self._public = tuple(prefixes)
        if self._connection is not None:
            self._connection.publish(self._public)

    async def stream(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """Send ``request`` and yield what the engine makes of it, until an output has ``finish``.

        Nothing is sent before the first item is asked for. A generator that is closed before its
        end (``aclose``, or cancellation while it waits) aborts the request, exactly once; hold it
        in ``contextlib.aclosing`` so that this happens at once.

        Raises:
            EngineError: the engine refused or failed the request, was lost on the way
                (``engine_lost``), is not ready (``engine_unavailable``), or this server takes no
                new requests (``draining``).
        """
        if self._draining:
            raise EngineError(
                503,
                "draining",
                "the server is stopping and takes no new requests; try again",
                RETRY_AFTER_S,
            )
        connection = self._connection
        if connection is None:
            raise EngineError(
                503,
                "engine_unavailable",
                "the engine is not ready: it is starting, or starting again; try again",
                RETRY_AFTER_S,
            )
        events = connection.begin(request)
        self.in_flight += 1
        self._idle.clear()
        try:
            while True:
                event = await events.get()
                if isinstance(event, EngineError):
                    raise event
                yield event
                if event.finish is not None:
                    return
        finally:
            connection.end(request.request_id)
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def on_supervisor_message(self, message: FromSupervisor) -> None:
        """Act on what the supervisor says of the engine; Stop concerns others and does nothing."""
        match message:
            case EngineReady():
                self._on_ready(message)
            case EngineLost():
                if self._connection is not None and self._connection.boot == message.boot:
                    self._disconnect(message.reason)
            case Drain():
                self._draining = True

    async def drained(self) -> None:
        """Return when no stream is in flight."""
        await self._idle.wait()

    async def close(self) -> None:
        """Fail what is in flight, and disconnect. Idempotent."""
        self._disconnect("the server stopped")
        self._context.destroy(linger=0)

    def _on_ready(self, ready: EngineReady) -> None:
        if self._connection is not None:
            if self._connection.boot == ready.boot:
                return
            self._disconnect("it was replaced")
        socket = self._context.socket(zmq.DEALER)
        configure_socket(socket)
        socket.set(zmq.IDENTITY, self._identity)
        socket.connect(ready.endpoint)
        self._connection = _Connection(ready.boot, socket, self)
        self._connection.publish(self._public)
        self.info = ready.info

    def _disconnect(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        self.info = self.stats = None
        self.tenants.engine_lost()
        if connection is not None:
            connection.close(
                EngineError(
                    503,
                    "engine_lost",
                    f"the request was cut off: the engine is gone ({reason}); send it again",
                    RETRY_AFTER_S,
                )
            )


class _Connection:
    """The link to one life of the engine, and the streams that wait on it."""

    def __init__(self, boot: str, socket: zmq.asyncio.Socket, client: EngineClient) -> None:
        self.boot = boot
        self._client = client
        self._socket = socket
        self._events: dict[int, asyncio.Queue[TokenOutput | EngineError]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._send(Abort(request_id=GREETING_ID))
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    def publish(self, prefixes: Iterable[PublicPrefix]) -> None:
        """Tell the engine of ``prefixes``; there is no answer."""
        for prefix in prefixes:
            self._send(prefix)

    def begin(self, request: Request) -> asyncio.Queue[TokenOutput | EngineError]:
        """Send ``request``; its outputs, or the error that ends it, come through the queue."""
        events: asyncio.Queue[TokenOutput | EngineError] = asyncio.Queue()
        self._events[request.request_id] = events
        self._send(request)
        return events

    def end(self, request_id: int) -> None:
        """Forget the request; abort it if the engine is still at it."""
        if self._events.pop(request_id, None) is not None:
            self._send(Abort(request_id=request_id))

    def close(self, error: EngineError) -> None:
        """End every stream with ``error``, after the outputs that have come; send nothing more."""
        self._fail_all(error)
        self._reader.cancel()
        self._socket.close(linger=0)

    def _send(self, message: ToEngine) -> None:
        send_now(self._socket, self._encoder.encode(message))

    async def _read(self) -> None:
        while True:
            payload: bytes = await self._socket.recv()
            try:
                step = self._decoder.decode(payload)
            except msgspec.MsgspecError:
                # Unreadable outputs may be anyone's; without this their streams would never end.
                log.exception("a message from the engine cannot be read; failing all its requests")
                for request_id in self._events:
                    self._send(Abort(request_id=request_id))
                self._fail_all(
                    EngineError(
                        500, "engine_protocol", "the engine sent an unreadable answer", None
                    )
                )
                continue
            self._client.stats = step.stats
            self._client.tenants.add(step.stats.tenants)
            for output in step.outputs:
                self._dispatch(output)

    def _dispatch(self, output: TokenOutput | RequestFailed) -> None:
        if isinstance(output, TokenOutput):
            if output.finish is None:
                events = self._events.get(output.request_id)
            else:
                events = self._events.pop(output.request_id, None)
            if events is not None:
                events.put_nowait(output)
            return
        events = self._events.pop(output.request_id, None)
        if events is not None:
            events.put_nowait(
                EngineError(output.status, output.code, output.message, output.retry_after)
            )

    def _fail_all(self, error: EngineError) -> None:
        for events in self._events.values():
            # One each: an exception that several tasks raise collects all their tracebacks.
            events.put_nowait(
                EngineError(error.status, error.code, error.message, error.retry_after)
            )
        self._events.clear()
