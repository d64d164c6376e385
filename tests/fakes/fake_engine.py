"""An engine without a model: speaks the engine's side of every protocol, for tests of the others.

A request whose first prompt token is N gets the tokens 0 … N-1, one a step; with N = 0 it is held
until it is aborted or the engine dies. Arguments: ``die`` exits with code 3 before it is ready,
``fail`` says that a restart would not mend it, ``deaf`` ignores Stop and SIGTERM.
"""

from __future__ import annotations

import signal
import sys

import msgspec
import zmq

from ktserve.ipc import (
    BlockingSupervisorLink,
    engine_address,
    exit_with_supervisor,
    new_boot_id,
    read_child_config,
)
from ktserve.messages import (
    EngineInfo,
    EngineReady,
    EngineStats,
    Request,
    StepOutput,
    Stop,
    ToEngine,
    TokenOutput,
)
from ktserve.tokens import unpack

INFO = EngineInfo(
    model="fake",
    architecture="FakeForCausalLM",
    device="cpu",
    dtype="float32",
    attention_backend="torch",
    context_length=128,
    page_size=4,
    pool_tokens=4096,
    capacity_tokens={},
    kv_bytes_per_token=1,
    weight_bytes=1,
    vocab_size=1000,
    eos_token_ids=(0,),
    max_running_requests=32,
    max_queued_requests=256,
)


def stats(running: int) -> EngineStats:
    return EngineStats(
        running=running,
        queued=0,
        pages_total=1024,
        pages_free=1024,
        pages_evictable=0,
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=0,
        evicted_tokens=0,
        preemptions=0,
        invariant_breaches=0,
    )


def main(mode: str) -> int:
    config = read_child_config(sys.stdin.buffer)
    exit_with_supervisor(sys.stdin.buffer)
    if mode == "die":
        return 3
    link = BlockingSupervisorLink(config.runtime_dir, "engine")
    if mode == "fail":
        link.fail("--model-path names no model; give a directory")
        return 1
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    boot = new_boot_id()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.set_hwm(0)
    router.bind(engine_address(config.runtime_dir, boot))
    link.send(EngineReady(boot=boot, endpoint=engine_address(config.runtime_dir, boot), info=INFO))
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(link.socket, zmq.POLLIN)
    peer = b""
    running = 0
    while True:
        ready = dict(poller.poll())
        if link.socket in ready:
            while (message := link.receive_nowait()) is not None:
                if isinstance(message, Stop) and mode != "deaf":
                    return 0
        if router in ready:
            identity, payload = router.recv_multipart()
            if identity != peer:
                peer, running = identity, 0
            request = msgspec.msgpack.decode(payload, type=ToEngine)
            if isinstance(request, Request):
                count = int(unpack(request.prompt)[0])
                running += count == 0
                steps = [
                    [
                        TokenOutput(
                            request_id=request.request_id,
                            token_ids=[index],
                            cached_tokens=0 if index == 0 else None,
                            finish="length" if index == count - 1 else None,
                        )
                    ]
                    for index in range(count)
                ] or [[]]
            else:
                steps = [[]]
            for outputs in steps:
                step = StepOutput(outputs=list(outputs), stats=stats(running))
                router.send_multipart([peer, msgspec.msgpack.encode(step)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["serve"]))
