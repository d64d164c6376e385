from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from ktserve.config import Settings
from ktserve.ipc import (
    AddressTooLong,
    BlockingSupervisorLink,
    ChildConfig,
    SupervisorLink,
    engine_address,
    new_api_identity,
    read_child_config,
    supervisor_address,
    write_child_config,
)
from ktserve.messages import Drain, Drained, Failed, Hello, Stop, ToSupervisor
from ktserve.tenancy.tenants import load_roster

SECRET = "sk-0123456789"


def config() -> ChildConfig:
    return ChildConfig(
        settings=Settings(api_key=SECRET, port=1234),
        runtime_dir="/r",
        pseudonym_key=b"k" * 32,
        roster=load_roster(Settings(api_key=SECRET)),
    )


def test_child_config_arrives_whole() -> None:
    stream = io.BytesIO()
    write_child_config(stream, config())
    stream.seek(0)
    assert read_child_config(stream) == config()


@pytest.mark.parametrize("kept", [0, 2, 40])
def test_cut_off_child_config_is_an_end_of_file(kept: int) -> None:
    stream = io.BytesIO()
    write_child_config(stream, config())
    with pytest.raises(EOFError, match="supervisor ended"):
        read_child_config(io.BytesIO(stream.getvalue()[:kept]))


def test_child_config_does_not_show_its_secrets() -> None:
    shown = repr(config())
    assert "/r" in shown
    assert SECRET not in shown
    assert "kkkk" not in shown


def test_address_length_is_checked_in_bytes() -> None:
    fits = "/" + "d" * (99 - len("/" + "/supervisor.ipc"))
    assert supervisor_address(fits) == f"ipc://{fits}/supervisor.ipc"
    with pytest.raises(AddressTooLong, match=r"100 bytes, the limit is 99.*--runtime-dir"):
        supervisor_address(fits + "d")
    with pytest.raises(AddressTooLong):
        engine_address("/" + "ü" * 45, "00")


def test_api_identities_are_fresh_and_legal() -> None:
    one, other = new_api_identity(), new_api_identity()
    assert one != other
    assert one[0] != 0, "ZeroMQ keeps identities that begin with a zero byte for itself"


class Supervisor:
    """The supervisor's socket and nothing else."""

    def __init__(self, runtime_dir: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.rcvtimeo = 5000
        self.socket.bind(supervisor_address(runtime_dir))
        self.peer = b""

    def receive(self) -> ToSupervisor:
        self.peer, payload = self.socket.recv_multipart()
        return msgspec.msgpack.decode(payload, type=ToSupervisor)

    def send(self, message: Drain | Stop) -> None:
        self.socket.send_multipart([self.peer, msgspec.msgpack.encode(message)])

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_blocking_link_in_a_poller(socket_dir: Path) -> None:
    supervisor = Supervisor(socket_dir)
    link = BlockingSupervisorLink(socket_dir, "engine")
    assert supervisor.receive() == Hello(role="engine", pid=os.getpid())
    assert link.receive_nowait() is None
    poller = zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    supervisor.send(Drain())
    supervisor.send(Stop())
    assert poller.poll(5000)
    assert link.receive() == Drain()
    assert link.receive() == Stop()
    assert link.receive_nowait() is None
    link.fail("why")
    assert supervisor.receive() == Failed(message="why")
    supervisor.close()


def test_asyncio_link(socket_dir: Path) -> None:
    supervisor = Supervisor(socket_dir)

    async def child() -> None:
        link = SupervisorLink(socket_dir, "api")
        assert supervisor.receive() == Hello(role="api", pid=os.getpid())
        supervisor.send(Drain())
        assert await asyncio.wait_for(link.receive(), 5) == Drain()
        await link.send(Drained())
        assert supervisor.receive() == Drained()
        await link.fail("why")
        assert supervisor.receive() == Failed(message="why")

    asyncio.run(child())
    supervisor.close()


BUSY_CHILD = """
import sys
from ktserve.ipc import exit_with_supervisor
exit_with_supervisor(sys.stdin.buffer)
print("up", flush=True)
while True:
    pass
"""


def test_child_ends_with_its_lifeline_though_it_is_busy() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(5) == 1
    child.stdout.close()
