"""One life of a child process: started with its configuration, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

from ktserve.ipc import ChildConfig, Role, encode_child_config


class Child:
    """A running child process, or one that has ended.

    Attributes:
        identity: its ZeroMQ routing id; None until it has said Hello.
        ready_at: when it said that it is ready, on the event loop's clock; None until then.
        exited: is done when the process has ended, and waited for.
    """

    def __init__(self, role: Role, process: asyncio.subprocess.Process) -> None:
        self.role = role
        self.pid = process.pid
        self.identity: bytes | None = None
        self.ready_at: float | None = None
        self._process = process
        self.exited = asyncio.create_task(process.wait(), name=f"{role}-exited")

    @classmethod
    async def start(cls, role: Role, command: Sequence[str], config: ChildConfig) -> Child:
        """Start ``command`` in a session of its own, so that Ctrl-C in a terminal reaches the
        supervisor alone, and hand it ``config``."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        child = cls(role, process)
        assert process.stdin is not None
        # Left open: it is the child's lifeline. A child that died already is seen by its exit.
        process.stdin.write(encode_child_config(config))
        return child

    @property
    def death(self) -> str:
        """How the process ended, as in "the engine …": ``exited with code 3``."""
        code = self.exited.result()
        if code >= 0:
            return f"exited with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        # The kernel's out-of-memory killer is the usual sender of a SIGKILL nobody knows of.
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def terminate(self) -> None:
        """SIGTERM to the process, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the process and what it started, if it lives."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
