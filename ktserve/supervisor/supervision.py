"""How the server's processes live and end: start, watch, restart, drain, stop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TextIO
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from ktserve.banner import banner_rows, exposure_warning, print_banner
from ktserve.cli.exit_codes import ExitCode
from ktserve.config import Settings
from ktserve.ipc import ChildConfig, Role, configure_socket, send_now, supervisor_address
from ktserve.messages import (
    ApiReady,
    Drain,
    Drained,
    EngineLost,
    EngineReady,
    Failed,
    FromSupervisor,
    Hello,
    Stop,
    ToSupervisor,
)
from ktserve.runtime_dir import RuntimeDir
from ktserve.supervisor.child import Child
from ktserve.supervisor.restarts import RestartPolicy, RestartRules
from ktserve.tenancy.tenants import Roster

STOP_SECONDS = 5.0
"""How long a child gets to end after it was told to."""

LAST_WORD_SECONDS = 0.5
"""How long a dead child's last message may take to arrive."""

PSEUDONYM_KEY_BYTES = 32

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger(__name__)


class Supervisor:
    """The two children and the socket on which they report; `run` is its whole life.

    Three things happen side by side: each child is kept alive by a task, a task listens to what
    the children say, and a task waits for the signal to drain. Whichever finds that the server
    must end says with which exit code; then both children are stopped.
    """

    def __init__(
        self,
        settings: Settings,
        runtime_dir: RuntimeDir,
        roster: Roster,
        commands: Mapping[Role, Sequence[str]],
        restarts: RestartRules,
        out: TextIO,
    ) -> None:
        self._settings = settings
        self._runtime_dir = runtime_dir
        self._commands = commands
        self._restarts = restarts
        self._out = out
        self._config = ChildConfig(
            settings=settings,
            runtime_dir=str(runtime_dir.path),
            pseudonym_key=os.urandom(PSEUDONYM_KEY_BYTES),
            roster=roster,
        )
        self._decoder: msgspec.msgpack.Decoder[ToSupervisor] = msgspec.msgpack.Decoder(ToSupervisor)
        self._children: dict[Role, Child] = {}
        self._engine: EngineReady | None = None
        self._url: str | None = None
        self._announced = False
        self._proven: set[Role] = set()

    async def run(self) -> ExitCode:
        """Run the server; returns, with nothing of it left, what the process exits with."""
        loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._signal: asyncio.Future[signal.Signals] = loop.create_future()
        self._hurry = asyncio.Event()
        self._drained = asyncio.Event()
        self._outcome: asyncio.Future[ExitCode] = loop.create_future()
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        configure_socket(self._socket)
        self._socket.bind(supervisor_address(self._runtime_dir.path))
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if warning := exposure_warning(self._settings):
            log.warning("%s", warning)
        tasks = [
            self._task(self._listen()),
            self._task(self._keep("engine")),
            self._task(self._keep("api")),
            self._task(self._drain_on_signal()),
        ]
        try:
            code = await self._outcome
            return await self._stop(code)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for child in self._children.values():
                child.kill()
                await child.exited
            context.destroy(linger=0)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """``work`` as a task whose error becomes the outcome of the whole."""
        task = asyncio.create_task(work)

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) and not self._outcome.done():
                self._outcome.set_exception(error)

        task.add_done_callback(done)
        return task

    def _end(self, code: ExitCode) -> None:
        self._ending.set()
        if not self._outcome.done():
            self._outcome.set_result(code)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._ending.is_set():
            if not self._hurry.is_set():
                log.warning("%s while stopping: killing both processes", number.name)
            self._hurry.set()
        else:
            self._ending.set()
            self._signal.set_result(number)

    # What the children say

    async def _listen(self) -> None:
        while True:
            identity, payload = await self._socket.recv_multipart()
            try:
                message = self._decoder.decode(payload)
            except msgspec.MsgspecError as error:
                log.error("a child sent an unreadable message: %s", error)
                continue
            if isinstance(message, Hello):
                self._on_hello(message, identity)
                continue
            # What a dead child said is about a life that is over.
            for child in self._children.values():
                if child.identity == identity:
                    self._on_message(child, message)
                    break

    def _on_hello(self, hello: Hello, identity: bytes) -> None:
        child = self._children.get(hello.role)
        if child is None or child.pid != hello.pid:
            return
        child.identity = identity
        if hello.role == "api" and self._engine is not None:
            self._send(child, self._engine)

    def _on_message(self, child: Child, message: ToSupervisor) -> None:
        match message:
            case EngineReady():
                self._on_ready(child)
                self._engine = message
                if api := self._children.get("api"):
                    self._send(api, message)
                self._announce()
            case ApiReady():
                self._on_ready(child)
                self._url = message.url
                self._keep_port(message.url)
                self._announce()
            case Drained():
                self._drained.set()
            case Failed():
                log.error("the %s cannot go on: %s", child.role, message.message)
                # What worked once failed now for want of memory or the like: it is tried again.
                if child.role not in self._proven and not self._ending.is_set():
                    self._end(ExitCode.USAGE)

    def _on_ready(self, child: Child) -> None:
        child.ready_at = asyncio.get_running_loop().time()
        self._proven.add(child.role)
        log.info("the %s is ready (process %d)", child.role, child.pid)

    def _keep_port(self, url: str) -> None:
        """With ``--port 0`` the system chose one: later lives of the API take the same."""
        port = urlsplit(url).port
        if self._settings.port == 0 and port is not None:
            self._config = msgspec.structs.replace(
                self._config, settings=dataclasses.replace(self._settings, port=port)
            )

    def _announce(self) -> None:
        if self._announced or self._engine is None or self._url is None:
            return
        self._announced = True
        rows = banner_rows(
            self._engine.info,
            self._settings,
            self._url,
            len(self._config.roster.entries),
            self._runtime_dir.path,
        )
        try:
            print_banner(rows, self._out)
        except OSError as error:
            log.warning("the banner could not be printed: %s", error.strerror)

    def _send(self, child: Child, message: FromSupervisor) -> None:
        """Send to a child that has said Hello; one that has not is told what matters then."""
        if child.identity is not None:
            send_now(self._socket, child.identity, msgspec.msgpack.encode(message))

    # Keeping the children alive

    async def _keep(self, role: Role) -> None:
        """Run the child ``role``, again and again, until the server ends."""
        policy = RestartPolicy(self._restarts)
        while not self._ending.is_set():
            child = await Child.start(role, self._commands[role], self._config)
            self._children[role] = child
            await asyncio.shield(child.exited)
            if role == "engine":
                self._lose_engine(f"it {child.death}")
                self._runtime_dir.remove_engine_sockets()
            if not self._ending.is_set():
                # It may have said why it cannot go on, and that ends the server.
                await _first(self._ending.wait(), timeout=LAST_WORD_SECONDS)
            del self._children[role]
            if self._ending.is_set():
                return
            await self._after_death(policy, child)

    async def _after_death(self, policy: RestartPolicy, child: Child) -> None:
        ready_seconds = None
        if child.ready_at is not None:
            ready_seconds = asyncio.get_running_loop().time() - child.ready_at
        delay = policy.after_death(ready_seconds)
        if delay is None:
            log.error(
                "the %s %s; it died %d times in a row before it was ready, giving up",
                child.role,
                child.death,
                self._restarts.unready_deaths,
            )
            self._end(ExitCode.INTERNAL)
            return
        log.error(
            "the %s (process %d) %s; starting it again in %g s",
            child.role,
            child.pid,
            child.death,
            delay,
        )
        await _first(self._ending.wait(), timeout=delay)

    def _lose_engine(self, reason: str) -> None:
        """Tell the API to fail what the engine held."""
        engine, self._engine = self._engine, None
        api = self._children.get("api")
        if engine is not None and api is not None:
            self._send(api, EngineLost(boot=engine.boot, reason=reason))

    # Ending

    async def _drain_on_signal(self) -> None:
        name = (await self._signal).name
        api = self._children.get("api")
        if api is None or api.ready_at is None or self._settings.drain_timeout == 0:
            log.info("%s: stopping", name)
            self._end(ExitCode.GOOD)
        else:
            self._end(await self._drain(name, api))

    async def _drain(self, name: str, api: Child) -> ExitCode:
        """Let the requests in flight finish; whether all of them could decides the exit code."""
        timeout = self._settings.drain_timeout
        log.info(
            "%s: draining; requests in flight get up to %g s, a second signal stops at once",
            name,
            timeout,
        )
        self._send(api, Drain())
        await _first(
            self._drained.wait(), asyncio.shield(api.exited), self._hurry.wait(), timeout=timeout
        )
        if self._hurry.is_set():
            return ExitCode.CHECK_FAILED
        if self._drained.is_set():
            log.info("drained: no request is in flight; stopping")
            return ExitCode.GOOD
        if api.exited.done():
            log.warning("the api %s while draining; stopping", api.death)
            return ExitCode.GOOD
        log.warning(
            "requests are still in flight after --drain-timeout %g s; cutting them off", timeout
        )
        self._lose_engine("the server stopped before the request was finished")
        return ExitCode.CHECK_FAILED

    async def _stop(self, code: ExitCode) -> ExitCode:
        """End both children: told to, and killed after `STOP_SECONDS` or on a further signal."""
        children = list(self._children.values())
        for child in children:
            if child.identity is not None and child.ready_at is not None:
                self._send(child, Stop())
            else:
                # It is starting and reads no messages yet.
                child.terminate()
        await _first(_all_exited(children), self._hurry.wait(), timeout=STOP_SECONDS)
        for child in children:
            if not child.exited.done():
                if not self._hurry.is_set():
                    log.warning("the %s did not stop in %g s; killing it", child.role, STOP_SECONDS)
                child.kill()
        await _all_exited(children)
        if self._hurry.is_set() and code == ExitCode.GOOD:
            code = ExitCode.CHECK_FAILED
        log.info("stopped")
        return code


async def _first(*waits: Coroutine[Any, Any, Any] | asyncio.Future[Any], timeout: float) -> None:
    """Return when one of ``waits`` is done, or after ``timeout`` seconds; the rest is cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _all_exited(children: Sequence[Child]) -> None:
    await asyncio.gather(*(asyncio.shield(child.exited) for child in children))
