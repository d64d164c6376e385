"""``python -m ktserve.api``: the HTTP process, a child of the supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

import uvicorn
import uvloop
from fastapi import FastAPI

from ktserve import certificates, logs
from ktserve.api.app import create_app
from ktserve.api.detokenizer import UnsupportedTokenizer
from ktserve.api.engine_client import EngineClient
from ktserve.api.http_protocol import client_faults_at_debug, limited_protocol
from ktserve.api.public_prefixes import UnusablePublicPrefix, check_context, tokenized
from ktserve.api.service import Service
from ktserve.config import Settings
from ktserve.ipc import ChildConfig, SupervisorLink, exit_with_supervisor, read_child_config
from ktserve.messages import ApiReady, Drain, Drained, EngineReady, PublicPrefix, Stop
from ktserve.models.packaged import PackagedModelMissing
from ktserve.models.source import ModelNotFound, ModelSource, locate, resolve
from ktserve.models.tokenizer import InvalidTokenizer, load_tokenizer
from ktserve.tenancy.tenants import Tenants

BACKLOG = 2048
STOP_SECONDS = 2
"""How long open connections get when the server stops; what was in flight has been drained."""

log = logging.getLogger("ktserve.api")


class CannotStart(ValueError):
    """A setting is wrong in a way that starting again would not mend; says which."""


_USER_ERRORS = (
    CannotStart,
    InvalidTokenizer,
    ModelNotFound,
    PackagedModelMissing,
    UnusablePublicPrefix,
    UnsupportedTokenizer,
)


def bind(settings: Settings) -> socket.socket:
    """The listening socket.

    Raises:
        CannotStart: the address is not this machine's, or the port is taken or privileged.
    """
    where = f"{settings.host} port {settings.port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise CannotStart(
            f"cannot listen on {where}: {reason}; choose another --port or --host"
        ) from None


def url_of(settings: Settings, listening: socket.socket) -> str:
    """Where ``listening`` is reached: with the real port, also where the setting is 0."""
    scheme = "https" if settings.ssl_certfile else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How uvicorn serves ``app``.

    Raises:
        CannotStart: the certificate or its key cannot be used.
    """
    config = uvicorn.Config(
        app,
        http=limited_protocol(settings.max_header_bytes),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        # Its lines hold query strings, in which some clients put keys.
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    logging.getLogger("uvicorn.error").addFilter(client_faults_at_debug)
    if settings.ssl_certfile is not None:
        # An encrypted key must fail here: asking for its passphrase would read the lifeline.
        problem = certificates.problem_of(settings.ssl_certfile, settings.ssl_keyfile)
        if problem is not None:
            raise CannotStart(problem)
    config.load()
    return config


class ApiProcess:
    """The HTTP process from its first word to the supervisor to its end."""

    def __init__(self, config: ChildConfig) -> None:
        self._config = config
        self._settings = config.settings
        self._link = SupervisorLink(config.runtime_dir, "api")
        self._engine = EngineClient()
        self._engine_seen = asyncio.Event()
        self._drain = asyncio.Event()
        self._server: uvicorn.Server | None = None
        self._service: Service | None = None
        self._public: tuple[PublicPrefix, ...] = ()

    async def run(self) -> int:
        """Serve until the supervisor says Stop; the exit status."""
        orders = asyncio.create_task(self._follow_orders(), name="orders")
        serving = asyncio.create_task(self._serve(), name="serving")
        draining = asyncio.create_task(self._drain_when_told(), name="draining")
        tasks = (orders, serving, draining)
        try:
            await asyncio.wait((orders, serving), return_when=asyncio.FIRST_COMPLETED)
            if orders.done():
                orders.result()
                if self._server is not None:
                    self._server.should_exit = True
                    await serving
            else:
                serving.result()
        except _USER_ERRORS as error:
            await self._link.fail(str(error))
            return 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._engine.close()
        self._link.close()
        return 0

    async def _serve(self) -> None:
        with bind(self._settings) as listening:
            tenants = Tenants(self._config.roster)
            source = await self._source()
            assert source.directory is not None, "a resolved model has a directory"
            tokenizer = await asyncio.to_thread(
                load_tokenizer, source.directory, self._settings.chat_template
            )
            app = create_app(
                self._settings,
                self._engine,
                tokenizer,
                tenants,
                self._config.pseudonym_key,
                self._settings.served_model_name or source.name,
            )
            service: Service = app.state.service
            self._public = await tokenized(tenants.public, service.tokenization)
            if self._engine.info is not None:
                check_context(self._public, self._engine.info)
            self._engine.publish(self._public)
            self._service = service
            self._server = uvicorn.Server(uvicorn_config(app, self._settings))
            # The socket listens already: what connects now waits in its backlog.
            await self._link.send(ApiReady(url=url_of(self._settings, listening)))
            await self._server.serve(sockets=[listening])

    async def _source(self) -> ModelSource:
        """Where the model's tokenizer is.

        A model that has to be converted or downloaded is left to the engine, which needs all of it
        and shows how far it is.
        """
        settings = self._settings
        source = locate(settings.model, settings.load_format, settings.cache_dir)
        if source.directory is not None:
            return source
        await self._engine_seen.wait()
        return await asyncio.to_thread(
            resolve, settings.model, settings.load_format, settings.revision, settings.cache_dir
        )

    async def _follow_orders(self) -> None:
        """Act on what the supervisor says; returns when the server is to stop."""
        while True:
            message = await self._link.receive()
            if isinstance(message, EngineReady):
                check_context(self._public, message.info)
            await self._engine.on_supervisor_message(message)
            match message:
                case EngineReady():
                    self._engine_seen.set()
                case Drain():
                    self._drain.set()
                case Stop():
                    return

    async def _drain_when_told(self) -> None:
        await self._drain.wait()
        if self._service is not None:
            self._service.admissions.drain()
            await self._service.admissions.idle()
        await self._engine.drained()
        await self._link.send(Drained())


def main() -> int:
    """Read the configuration from standard input and run."""
    config = read_child_config(sys.stdin.buffer)
    exit_with_supervisor(sys.stdin.buffer)
    logs.configure(config.settings.log_level, config.settings.log_format, process="api")
    return uvloop.run(_run(config))


async def _run(config: ChildConfig) -> int:
    return await ApiProcess(config).run()


if __name__ == "__main__":
    sys.exit(main())
