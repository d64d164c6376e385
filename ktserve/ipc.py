"""How the processes reach each other: sockets in the runtime directory, and standard input.

Two sockets, both ZeroMQ over ``ipc://``, MessagePack, unbounded and without linger:

- ``supervisor.ipc``: the supervisor's ROUTER binds, each child's DEALER connects and says Hello
  first. Carries `ToSupervisor` and `FromSupervisor`.
- ``engine-<boot>.ipc``: the engine's ROUTER binds, the API's DEALER connects. Carries `ToEngine`
  and `FromEngine`. The address holds the engine's boot id, so nothing sent to a dead engine can
  reach the next one.

The identity of the API's DEALER is a fresh random one in each life of the API process (see
`new_api_identity`). The engine answers the identity that it heard last. A message from an identity
that it does not know means that the API process was restarted: the engine first aborts every
request of the identity before it. So that it learns of this at once, and not with the next request,
the API greets the engine with an Abort of `GREETING_ID`, an id that no request has.

A child reads its configuration from standard input, where neither a process list nor an environment
shows it, and then keeps that pipe as a lifeline: nothing more is ever written to it, and its end
means that the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import zmq
import zmq.asyncio

from ktserve.config import Settings
from ktserve.messages import Failed, FromSupervisor, Hello, ToSupervisor
from ktserve.tenancy.tenants import Roster

Role = Literal["engine", "api"]

MAX_ADDRESS_BYTES = 99
"""The longest path of a socket; the smallest limit of a supported system is 104 bytes with NUL."""

GREETING_ID = 0
"""The request id in the API's greeting; requests count from 1."""

_SUPERVISOR_SOCKET = "supervisor.ipc"
_LENGTH_BYTES = 4
_LAST_WORD_MS = 1000


class AddressTooLong(ValueError):
    """The runtime directory's path leaves no room for a socket's name."""


class ChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told at start. Holds secrets: neither logged nor shown.

    Attributes:
        pseudonym_key: the key of this boot under which namespaces are shown.
        roster: the tenants, with what an operator has changed.
    """

    settings: Settings
    runtime_dir: str
    pseudonym_key: bytes
    roster: Roster

    def __repr__(self) -> str:
        return f"ChildConfig(runtime_dir={self.runtime_dir!r}, ...)"


def encode_child_config(config: ChildConfig) -> bytes:
    """``config`` as a child reads it: a 4-byte big-endian length, then MessagePack."""
    body = msgspec.msgpack.encode(config)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def write_child_config(stream: BinaryIO, config: ChildConfig) -> None:
    """Send ``config`` to the child that reads ``stream``."""
    stream.write(encode_child_config(config))
    stream.flush()


def read_child_config(stream: BinaryIO) -> ChildConfig:
    """The configuration that the supervisor wrote; blocks until it is there.

    Call it, and then `exit_with_supervisor`, before anything slow: a child is not bound to the
    supervisor's life until then.

    Raises:
        EOFError: the supervisor ended before it wrote all of it.
    """
    size = int.from_bytes(_read_exactly(stream, _LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_read_exactly(stream, size), type=ChildConfig)


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError("the supervisor ended before it had sent the configuration")
    return data


def exit_with_supervisor(stream: BinaryIO) -> None:
    """End this process, whatever it is doing, as soon as the supervisor's end of ``stream`` closes.

    Works however the supervisor ended, SIGKILL included. Returns at once; a daemon thread waits.
    """

    # The descriptor, not the stream: a daemon thread that holds the stream's lock would break the
    # interpreter's own end.
    descriptor = stream.fileno()

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def new_boot_id() -> str:
    """A random id for one life of the engine."""
    return secrets.token_hex(8)


def new_api_identity() -> bytes:
    """A random ZeroMQ routing id for one life of the API process; see the module's text."""
    return b"api-" + secrets.token_bytes(8)


def supervisor_address(runtime_dir: str | Path) -> str:
    """The supervisor's ZeroMQ address.

    Raises:
        AddressTooLong: see `MAX_ADDRESS_BYTES`.
    """
    return _address(runtime_dir, _SUPERVISOR_SOCKET)


def engine_address(runtime_dir: str | Path, boot: str) -> str:
    """The ZeroMQ address of the engine's life ``boot``, a value of `new_boot_id`.

    Raises:
        AddressTooLong: see `MAX_ADDRESS_BYTES`.
    """
    return _address(runtime_dir, f"engine-{boot}.ipc")


def _address(runtime_dir: str | Path, name: str) -> str:
    path = os.path.join(runtime_dir, name)
    size = len(os.fsencode(path))
    if size > MAX_ADDRESS_BYTES:
        raise AddressTooLong(
            f"the runtime directory {runtime_dir} is too long: its socket {name} would have a path "
            f"of {size} bytes, the limit is {MAX_ADDRESS_BYTES}; choose a shorter --runtime-dir or "
            "--name"
        )
    return f"ipc://{path}"


class SupervisorLink:
    """A child's connection to the supervisor, for a process that runs an asyncio loop."""

    def __init__(self, runtime_dir: str | Path, role: Role) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _connect(self._socket, runtime_dir)
        self._decoder = msgspec.msgpack.Decoder(FromSupervisor)
        self._send_now(Hello(role=role, pid=os.getpid()))

    async def send(self, message: ToSupervisor) -> None:
        """Send ``message``; does not wait for the supervisor to read it."""
        self._send_now(message)

    async def receive(self) -> FromSupervisor:
        """The next message, in the order in which the supervisor sent them."""
        payload: bytes = await self._socket.recv()
        return self._decoder.decode(payload)

    async def fail(self, message: str) -> None:
        """Tell the supervisor why this process cannot go on, and close. The process then exits.

        The supervisor prints ``message`` and ends the whole server: for what a restart would not
        mend. It names the flag, the limit and the remedy, and holds no secret.
        """
        self._send_now(Failed(message=message))
        self.close()

    def close(self) -> None:
        """Close the connection; blocks up to a second for what was sent to be handed over."""
        _close(self._socket, self._context)

    def _send_now(self, message: ToSupervisor) -> None:
        send_now(self._socket, msgspec.msgpack.encode(message))


class BlockingSupervisorLink:
    """A child's connection to the supervisor, for a process that runs a loop of its own.

    Attributes:
        socket: register it with a ``zmq.Poller`` for POLLIN, and call `receive_nowait` until it
            gives None whenever the poller reports it.
    """

    def __init__(self, runtime_dir: str | Path, role: Role) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        _connect(self.socket, runtime_dir)
        self._decoder = msgspec.msgpack.Decoder(FromSupervisor)
        self.send(Hello(role=role, pid=os.getpid()))

    def fileno(self) -> int:
        """A descriptor that becomes readable, once (edge-triggered), when `receive_nowait` may have
        something; a ``zmq.Poller`` on `socket` is simpler."""
        descriptor = self.socket.get(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    def send(self, message: ToSupervisor) -> None:
        """Send ``message``; does not wait for the supervisor to read it."""
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromSupervisor:
        """The next message; blocks until there is one."""
        return self._decoder.decode(self.socket.recv())

    def receive_nowait(self) -> FromSupervisor | None:
        """The next message, or None where there is none yet."""
        try:
            payload = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._decoder.decode(payload)

    def fail(self, message: str) -> None:
        """As `SupervisorLink.fail`."""
        self.send(Failed(message=message))
        self.close()

    def close(self) -> None:
        """Close the connection; blocks up to a second for what was sent to be handed over."""
        _close(self.socket, self._context)


def configure_socket(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    """Make ``socket`` unbounded in both directions and close without waiting."""
    socket.set_hwm(0)
    socket.set(zmq.LINGER, 0)


def send_now(socket: zmq.asyncio.Socket, *frames: bytes) -> None:
    """Hand one message of ``frames`` to an unbounded ``socket``, without a turn of the loop."""
    sent = socket.send_multipart(frames)
    # Done already: only a full queue would have to wait, and this one is never full.
    assert isinstance(sent, asyncio.Future)
    sent.result()


def _connect(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, runtime_dir: str | Path) -> None:
    configure_socket(socket)
    socket.connect(supervisor_address(runtime_dir))


def _close(
    socket: zmq.Socket[bytes] | zmq.asyncio.Socket,
    context: zmq.Context[zmq.Socket[bytes]] | zmq.asyncio.Context,
) -> None:
    # A child's last word explains its end; it may take the moment that it needs to get out.
    socket.close(linger=_LAST_WORD_MS)
    context.term()
