"""An API process without HTTP: `EngineClient` behind a line protocol on ``control.sock``.

A line holds N, as `fake_engine` understands it. The answer is lines too: each token as it comes,
then ``end``, or ``error`` with its code. ``deaf`` ignores Stop and SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from ktserve.api.engine_client import EngineClient, EngineError
from ktserve.ipc import SupervisorLink, exit_with_supervisor, read_child_config
from ktserve.messages import ApiReady, Drain, Drained, Request, SamplingParams, Stop
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import pack


async def serve(mode: str) -> None:
    config = read_child_config(sys.stdin.buffer)
    exit_with_supervisor(sys.stdin.buffer)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = SupervisorLink(config.runtime_dir, "api")
    engine = EngineClient()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = Request(
            request_id=engine.next_request_id(),
            namespace=Namespace(tenant="t", cache_salt=None, extra_key=None, adapter=None),
            prompt=pack([int(await reader.readline())]),
            sampling=SamplingParams(max_tokens=1),
        )
        try:
            async for output in engine.stream(request):
                writer.write(f"{output.token_ids[0]}\n".encode())
            writer.write(b"end\n")
        except EngineError as error:
            writer.write(f"error {error.status} {error.code}: {error.message}\n".encode())
        writer.close()
        await writer.wait_closed()

    await asyncio.start_unix_server(answer, os.path.join(config.runtime_dir, "control.sock"))
    port = config.settings.port or 1024 + os.getpid() % 60000
    print(f"port {port}", file=sys.stderr, flush=True)
    await link.send(ApiReady(url=f"http://{config.settings.host}:{port}"))

    async def report_drained() -> None:
        await engine.drained()
        await link.send(Drained())

    drains = []
    while True:
        message = await link.receive()
        await engine.on_supervisor_message(message)
        if isinstance(message, Drain):
            drains.append(asyncio.create_task(report_drained()))
        if isinstance(message, Stop) and mode != "deaf":
            break
    await engine.close()
    link.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:] or ["serve"]))
