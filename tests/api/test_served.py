"""Over a real socket: the official client, clients that go away, limits of HTTP itself."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from rosters import with_keys

from ktserve.messages import Request, TokenOutput
from ktserve.tenancy.tenants import Limits, Tenant

Served = Callable[..., AbstractContextManager[str]]
HELLO: Any = [{"role": "user", "content": "Hello"}]


def client(url: str, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)


def hanging(lab: Any, *, first: bool) -> Any:
    """An engine that gives each request one token, if ``first``, and then nothing more."""
    engine = lab.says("")
    token = TokenOutput(request_id=0, token_ids=lab.ids("Hi"), cached_tokens=0)
    engine.script = lambda _request: [*([token] if first else []), asyncio.Event()]
    return engine


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
        yield connection


def http_post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def test_the_official_client(lab: Any, served: Served) -> None:
    with served(lab.app(lab.says("Hi 日本", cached=4))) as url:
        openai_client = client(url)
        assert [model.id for model in openai_client.models.list()] == ["tiny"]
        assert openai_client.models.retrieve("tiny").id == "tiny"
        chat = openai_client.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=1, extra_body={"top_k": 5}
        )
        assert chat.choices[0].message.content == "Hi 日本"
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 4
        assert chat.choices[0].logprobs is not None
        text = openai_client.completions.create(model="tiny", prompt=["a", "b"])
        assert [choice.text for choice in text.choices] == ["Hi 日本", "Hi 日本"]


def test_the_official_client_streams(lab: Any, served: Served) -> None:
    with served(lab.app(lab.says("Hi 日本", cached=4))) as url:
        chunks = list(
            client(url).chat.completions.create(
                model="tiny",
                messages=HELLO,
                n=2,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        for index in (0, 1):
            deltas = [c.delta for chunk in chunks for c in chunk.choices if c.index == index]
            assert deltas[0].role == "assistant"
            assert "".join(delta.content or "" for delta in deltas) == "Hi 日本"
        reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
        assert reasons == ["stop", "stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        texts = client(url).completions.create(model="tiny", prompt="x", stream=True)
        assert "".join(chunk.choices[0].text for chunk in texts) == "Hi 日本"


def test_the_official_clients_errors(lab: Any, served: Served) -> None:
    tenants = with_keys((Tenant("acme"), ["key"]))
    with served(lab.app(lab.says("Hi"), tenants)) as url:
        with pytest.raises(openai.AuthenticationError):
            client(url, "wrong").models.list()
        with pytest.raises(openai.NotFoundError):
            client(url, "key").chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as caught:
            client(url, "key").chat.completions.create(model="tiny", messages=HELLO, temperature=9)
        assert caught.value.param == "temperature"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_aborts_exactly_once(
    lab: Any, served: Served, stream: bool, first: bool, n: int
) -> None:
    engine = hanging(lab, first=first)
    app = lab.app(engine)
    with served(app) as url:
        with connected(url) as connection:
            body = {"messages": HELLO, "stream": stream, "n": n}
            connection.sendall(http_post("/v1/chat/completions", body))
            engine.wait_for(lambda: len(engine.requests) == n)
            if stream and first:
                assert b"200 OK" in connection.recv(65536)
            assert engine.aborted == []
        engine.wait_for(lambda: len(engine.aborted) == n)
        assert httpx.get(f"{url}/health").status_code == 200
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
        assert app.state.service.admissions.draining is False
        asyncio.run(asyncio.wait_for(app.state.service.admissions.idle(), 5))


def test_a_client_that_stays_aborts_nothing(lab: Any, served: Served) -> None:
    engine = lab.says("Hi")
    with served(lab.app(engine)) as url:
        for stream in (False, True):
            body = {"messages": HELLO, "stream": stream}
            assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    assert engine.aborted == []


def test_a_client_that_goes_away_behind_a_pipelined_request(lab: Any, served: Served) -> None:
    engine = hanging(lab, first=True)
    with served(lab.app(engine)) as url:
        with connected(url) as connection:
            request = http_post("/v1/chat/completions", {"messages": HELLO, "stream": True})
            connection.sendall(request + request)
            engine.wait_for(lambda: len(engine.requests) == 1)
        engine.wait_for(lambda: len(engine.aborted) == 1)


def test_a_client_that_goes_away_in_its_body_is_no_error(
    lab: Any, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    engine = lab.says("Hi")
    with served(lab.app(engine)) as url:
        with connected(url) as connection:
            connection.sendall(http_post("/v1/chat/completions", {"messages": HELLO})[:-5])
        assert httpx.get(f"{url}/health").status_code == 200
    assert engine.requests == []
    assert "Traceback" not in caplog.text


def test_one_more_than_the_tenants_places_is_a_429(lab: Any, served: Served) -> None:
    engine = hanging(lab, first=True)
    acme = Tenant("acme", limits=Limits(max_concurrent_requests=1))
    tenants = with_keys((acme, ["a"]), (Tenant("globex"), ["g"]))
    with served(lab.app(engine, tenants)) as url:
        stream = client(url, "a").chat.completions.create(model="tiny", messages=HELLO, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client(url, "a").chat.completions.create(model="tiny", messages=HELLO)
        assert caught.value.response.headers["retry-after"] == "1"
        other = client(url, "g").chat.completions.create(model="tiny", messages=HELLO, stream=True)
        next(iter(other))
        other.close()
        stream.close()
        engine.wait_for(lambda: len(engine.aborted) == 2)
        engine.script = lab.says("Hi").script
        answer = client(url, "a").chat.completions.create(model="tiny", messages=HELLO)
        assert answer.choices[0].message.content == "Hi"


def test_draining_lets_nothing_in_and_waits_for_what_is(lab: Any, served: Served) -> None:
    release = threading.Event()
    engine = lab.says("")

    async def stream(request: Request) -> Any:
        engine.requests.append(request)
        yield TokenOutput(request_id=0, token_ids=lab.ids("Hi"), cached_tokens=0)
        await asyncio.to_thread(release.wait)
        yield TokenOutput(request_id=0, token_ids=lab.ids("!"), finish="length")

    engine.stream = stream
    app = lab.app(engine)
    admissions = app.state.service.admissions
    with served(app) as url:
        chunks = client(url).chat.completions.create(model="tiny", messages=HELLO, stream=True)
        iterator = iter(chunks)
        next(iterator)
        admissions.drain()
        response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "draining"
        assert int(response.headers["retry-after"]) > 0
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200
        release.set()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in iterator) == "Hi!"


@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ",
        b"GET /",
        b"POST /v1/tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Tail: ",
    ],
)
def test_a_head_that_is_too_long_is_a_431(lab: Any, served: Served, start: bytes) -> None:
    with served(lab.app(lab.says("Hi")), max_header_bytes=2048) as url:
        with connected(url) as connection:
            connection.sendall(start + b"x" * 5000)
            answer = read_all(connection)
        if b"chunked" not in start:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431 ")
            assert "--max-header-bytes" in json.loads(body)["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 200


def test_headers_within_the_limit_and_large_bodies_pass(lab: Any, served: Served) -> None:
    with served(lab.app(lab.says("Hi")), max_header_bytes=2048) as url:
        answer = httpx.post(
            f"{url}/v1/tokenize", json={"prompt": "word " * 30_000}, headers={"X": "x" * 1500}
        )
        assert answer.json()["count"] >= 30_000
        with httpx.Client() as kept:
            for _ in range(5):
                assert kept.get(f"{url}/health", headers={"X": "x" * 1500}).status_code == 200


def test_what_is_no_http_is_a_400_in_openais_shape(lab: Any, served: Served) -> None:
    with served(lab.app(lab.says("Hi"))) as url, connected(url) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_what_is_no_http_fills_no_log(
    lab: Any, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def send(url: str) -> None:
        with connected(url) as connection:
            connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
            read_all(connection)
        upgrade = {"connection": "upgrade", "upgrade": "websocket"}
        assert httpx.get(f"{url}/health", headers=upgrade).status_code == 200

    # uvicorn's own level would hide what the filter lets through.
    def serve() -> list[tuple[str, int]]:
        caplog.clear()
        with served(lab.app(lab.says("Hi"))) as url:
            logging.getLogger("uvicorn.error").setLevel(logging.DEBUG)
            for _ in range(3):
                send(url)
        return [(r.getMessage(), r.levelno) for r in caplog.records if r.name == "uvicorn.error"]

    caplog.set_level("INFO", "ktserve.api")
    assert not [line for line, level in serve() if level >= logging.WARNING or "Invalid" in line]
    caplog.set_level("DEBUG", "ktserve.api")
    assert serve().count(("Invalid HTTP request received.", logging.DEBUG)) == 3


def test_a_body_that_grows_past_the_limit_is_a_413(lab: Any, served: Served) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * 1024

    with served(lab.app(lab.says("Hi"), max_request_bytes=4096)) as url:
        try:
            response = httpx.post(
                f"{url}/v1/completions",
                content=endless(),
                headers={"content-type": "application/json"},
            )
        except httpx.WriteError:
            # The server closed before everything was sent: also a refusal.
            return
        assert response.status_code == 413


def test_tls(lab: Any, served: Served, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    files = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    with served(lab.app(lab.says("Hi")), **files) as plain:
        url = plain.replace("http:", "https:")
        trusting = ssl.create_default_context(cafile=certificate)
        assert httpx.get(f"{url}/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
