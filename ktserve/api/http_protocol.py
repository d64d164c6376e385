"""uvicorn's HTTP protocol with a limit on a request's head, which httptools itself has not."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ktserve.api.errors import ApiError

_PROTOCOL_MODULE = HttpToolsProtocol.__module__.rpartition(".")[2]


def client_faults_at_debug(record: logging.LogRecord) -> bool:
    """A filter for uvicorn's log: its protocol's warnings become debug lines.

    Each says only that a client sent what is no HTTP, or asked for an upgrade. Anyone who reaches
    the port can have as many of them as they like, so that they are no news to an operator.
    """
    if record.levelno == logging.WARNING and record.module == _PROTOCOL_MODULE:
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logging.getLogger("ktserve.api").isEnabledFor(logging.DEBUG)
    return True


class LimitedHttpProtocol(HttpToolsProtocol):
    """Refuses a request whose line and headers are longer than ``max_head`` bytes: 431, and close.

    What is counted is every byte since the last one of a body, so that a chunked body's extensions
    and trailers are within the limit too. Of pipelined requests a later one may begin uncounted in
    the part in which the one before ended, so that it may have up to twice as much.
    """

    def __init__(self, max_head: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_head = max_head
        self._counted = 0
        self._running: RequestResponseCycle | None = None

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            room = self._max_head - self._counted
            if room <= 0:
                self._refuse(
                    ApiError(
                        431,
                        f"the request's line and headers are longer than {self._max_head} bytes; "
                        "send less, or start the server with a larger --max-header-bytes",
                        code="headers_too_large",
                    )
                )
                return
            part, data = data[:room], data[room:]
            self._counted += len(part)
            super().data_received(part)

    def on_headers_complete(self) -> None:
        self._counted = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._counted = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._counted = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn tells only the latest of pipelined requests, which has not begun.
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def _refuse(self, error: ApiError) -> None:
        # An answer that has begun would swallow this one.
        if self._running is None or self._running.response_complete:
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                "content-type: application/json\r\n"
                f"content-length: {len(body)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def limited_protocol(max_head: int) -> type[asyncio.Protocol]:
    """The protocol class, with its limit, to give uvicorn as ``http``."""

    class Limited(LimitedHttpProtocol):
        def __init__(
            self,
            config: uvicorn.Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(max_head, config, server_state, app_state, _loop)

    return Limited
