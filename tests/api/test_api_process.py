"""``python -m ktserve.api`` as the supervisor and the engine see it."""

from __future__ import annotations

import hashlib
import io
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from ktserve.config import Settings
from ktserve.ipc import ChildConfig, engine_address, supervisor_address, write_child_config
from ktserve.messages import (
    Abort,
    ApiReady,
    Drain,
    Drained,
    EngineInfo,
    EngineLost,
    EngineReady,
    EngineStats,
    Failed,
    Hello,
    PublicPrefix,
    Request,
    StepOutput,
    Stop,
    ToEngine,
    TokenOutput,
    ToSupervisor,
)
from ktserve.tenancy.tenants import load_roster

WAIT_MS = 30_000
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
KEY = "kts-a"
KEY_ENTRY = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
STATS = EngineStats(
    running=0, queued=0, pages_total=1, pages_free=1, pages_evictable=0, prompt_tokens=0,
    cached_tokens=0, generated_tokens=0, evicted_tokens=0, preemptions=0, invariant_breaches=0,
)  # fmt: skip
INFO = EngineInfo(
    model="m", architecture="LlamaForCausalLM", device="cpu", dtype="float32",
    attention_backend="torch", context_length=512, page_size=1, pool_tokens=512,
    capacity_tokens={}, kv_bytes_per_token=1, weight_bytes=1, vocab_size=49152, eos_token_ids=(2,),
    max_running_requests=1, max_queued_requests=1,
)  # fmt: skip


@dataclass
class Peer:
    """The other end of one of the process's sockets."""

    socket: zmq.Socket[bytes]
    type: Any
    identity: bytes = b""

    def receive(self) -> Any:
        assert self.socket.poll(WAIT_MS), "the process said nothing"
        self.identity, payload = self.socket.recv_multipart()
        return msgspec.msgpack.decode(payload, type=self.type)

    def send(self, message: object) -> None:
        self.socket.send_multipart([self.identity, msgspec.msgpack.encode(message)])


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    supervisor: Peer
    engine: Peer
    ready: EngineReady


@contextmanager
def running(settings: Settings) -> Iterator[Running]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="kt-") as directory:
        supervisor, engine = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        supervisor.bind(supervisor_address(directory))
        endpoint = engine_address(directory, "b1")
        engine.bind(endpoint)
        process = subprocess.Popen([sys.executable, "-m", "ktserve.api"], stdin=subprocess.PIPE)
        assert isinstance(process.stdin, io.BufferedWriter)
        try:
            write_child_config(
                process.stdin,
                ChildConfig(
                    settings=settings,
                    runtime_dir=directory,
                    pseudonym_key=b"k" * 32,
                    roster=load_roster(settings),
                ),
            )
            yield Running(
                process,
                Peer(supervisor, ToSupervisor),
                Peer(engine, ToEngine),
                EngineReady(boot="b1", endpoint=endpoint, info=INFO),
            )
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            context.destroy(linger=0)


@pytest.fixture(scope="module")
def model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory that is enough of a model for the API."""
    directory: Path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text("{}")
    return str(directory)


def test_a_life_from_hello_to_stop(model: str) -> None:
    settings = Settings(model=model, load_format="dummy", port=0)
    with running(settings) as api, ThreadPoolExecutor() as threads:
        hello = api.supervisor.receive()
        assert hello == Hello(role="api", pid=api.process.pid)
        ready = api.supervisor.receive()
        assert isinstance(ready, ApiReady)
        assert httpx.get(f"{ready.url}/health", timeout=20).status_code == 200
        assert httpx.get(f"{ready.url}/ready").status_code == 503
        assert httpx.post(f"{ready.url}/v1/chat/completions", json=HELLO).status_code == 503

        api.supervisor.send(api.ready)
        assert isinstance(api.engine.receive(), Abort)  # its greeting
        answer = threads.submit(_post, ready.url)
        request = api.engine.receive()
        assert isinstance(request, Request)
        assert request.namespace.tenant == "default"
        output = TokenOutput(
            request_id=request.request_id, token_ids=[19556], cached_tokens=0, finish="length"
        )
        api.engine.send(StepOutput(outputs=[output], stats=STATS))
        answered = answer.result(timeout=20)
        assert answered.status_code == 200
        assert answered.json()["model"] == "tiny"
        assert answered.json()["choices"][0]["message"]["content"] == "Hello"

        answer = threads.submit(_post, ready.url)
        assert isinstance(api.engine.receive(), Request)
        api.supervisor.send(EngineLost(boot="b1", reason="it was killed"))
        lost = answer.result(timeout=20)
        assert lost.status_code == 503
        assert lost.json()["error"]["code"] == "engine_lost"

        api.supervisor.send(Drain())
        assert isinstance(api.supervisor.receive(), Drained)
        refused = httpx.post(f"{ready.url}/v1/chat/completions", json=HELLO)
        assert refused.status_code == 503
        api.supervisor.send(Stop())
        assert api.process.wait(timeout=20) == 0


def test_public_prefixes_reach_the_engine_before_requests(model: str, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(
        f"[tenants.a]\nkeys = ['{KEY_ENTRY}']\n"
        "[[public]]\nname = 'rules'\ntenants = ['a']\nsystem = 'You are polite.'\n"
        "[[public]]\nname = 'story'\ntenants = ['a']\ntext = 'Once upon a time'\n"
    )
    settings = Settings(model=model, load_format="dummy", port=0, tenants=str(file))
    with running(settings) as api, ThreadPoolExecutor() as threads:
        assert isinstance(api.supervisor.receive(), Hello)
        ready = api.supervisor.receive()
        assert isinstance(ready, ApiReady)
        api.supervisor.send(api.ready)
        assert isinstance(api.engine.receive(), Abort)  # its greeting
        rules, story = api.engine.receive(), api.engine.receive()
        assert isinstance(rules, PublicPrefix)
        assert (rules.name, rules.tenants) == ("rules", ("a",))
        assert isinstance(story, PublicPrefix)
        assert story.name == "story"
        body = {
            "messages": [{"role": "system", "content": "You are polite."}, *HELLO["messages"]],
            "max_tokens": 1,
        }
        threads.submit(_post, ready.url, body, KEY)
        request = api.engine.receive()
        assert isinstance(request, Request)
        assert request.prompt.startswith(rules.prompt)


def test_a_public_prefix_that_cannot_be_is_said_to_the_supervisor(
    model: str, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(
        f"[tenants.a]\nkeys = ['{KEY_ENTRY}']\n"
        "[[public]]\nname = 'rules'\ntenants = ['a']\nsystem = 'You are polite.'\n"
    )
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    settings = Settings(
        model=model, load_format="dummy", port=0, tenants=str(file), chat_template=str(template)
    )
    with running(settings) as api:
        assert isinstance(api.supervisor.receive(), Hello)
        failed = api.supervisor.receive()
        assert isinstance(failed, Failed)
        assert "public prefix rules: chats do not begin with the system message" in failed.message
        assert api.process.wait(timeout=20) == 1


@pytest.mark.parametrize("early", [True, False])
def test_a_public_prefix_beyond_the_context_is_said_to_the_supervisor(
    model: str, tmp_path: Path, early: bool
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(
        f"[tenants.a]\nkeys = ['{KEY_ENTRY}']\n"
        f"[[public]]\nname = 'saga'\ntenants = ['a']\ntext = '{'word ' * 600}'\n"
    )
    settings = Settings(model=model, load_format="dummy", port=0, tenants=str(file))
    with running(settings) as api:
        assert isinstance(api.supervisor.receive(), Hello)
        if early:  # the engine may be ready before the prefix is known, and after it
            api.supervisor.send(api.ready)
        else:
            assert isinstance(api.supervisor.receive(), ApiReady)
            api.supervisor.send(api.ready)
        failed = api.supervisor.receive()
        assert isinstance(failed, Failed)
        assert "public prefix saga: it has 6" in failed.message
        assert "context_length of 512" in failed.message
        assert api.process.wait(timeout=20) == 1


def test_a_port_that_is_taken_is_said_to_the_supervisor(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(Settings(model=model, load_format="dummy", port=port)) as api:
            assert isinstance(api.supervisor.receive(), Hello)
            failed = api.supervisor.receive()
            assert isinstance(failed, Failed)
            assert "--port" in failed.message
            assert str(port) in failed.message
            assert api.process.wait(timeout=20) == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"ssl_certfile": __file__}, "--ssl-certfile"),
        ({"host": "203.0.113.1"}, "--host"),
    ],
)
def test_a_setting_that_is_wrong_is_said_to_the_supervisor(
    model: str, settings: dict[str, Any], named: str
) -> None:
    chosen = Settings(**{"model": model, "load_format": "dummy", "port": 0, **settings})
    with running(chosen) as api:
        assert isinstance(api.supervisor.receive(), Hello)
        failed = api.supervisor.receive()
        assert isinstance(failed, Failed)
        assert named in failed.message
        assert api.process.wait(timeout=20) == 1


def test_stop_before_the_model_is_there(tmp_path: Path) -> None:
    # The packaged model, which the engine has not converted yet.
    with running(Settings(port=0, cache_dir=str(tmp_path))) as api:
        assert isinstance(api.supervisor.receive(), Hello)
        api.supervisor.send(Stop())
        assert api.process.wait(timeout=20) == 0


def test_the_end_of_standard_input_is_the_end_of_the_process(model: str) -> None:
    with running(Settings(model=model, load_format="dummy", port=0)) as api:
        assert isinstance(api.supervisor.receive(), Hello)
        assert api.process.stdin is not None
        api.process.stdin.close()
        assert api.process.wait(timeout=20) == 1


def test_the_process_imports_no_torch() -> None:
    code = "import ktserve.api.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _post(url: str, body: dict[str, Any] = HELLO, key: str = "any") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=20)
