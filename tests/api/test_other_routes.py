"""Models, tokens, metrics, and what a request for anything else gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

Call = Callable[..., httpx.Response]


def test_the_served_model_is_listed_and_found_by_name(lab: Any, call: Call) -> None:
    app = lab.app(lab.says("Hi"))
    listed = call(app, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert listed["data"][0]["max_model_len"] == 2048
    assert call(app, "GET", "/v1/models/tiny").json() == listed["data"][0]
    missing = call(app, "GET", "/v1/models/org/other%1b")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert "\x1b" not in missing.json()["error"]["message"]


def test_models_are_listed_while_the_engine_starts(lab: Any, call: Call) -> None:
    engine = lab.says("Hi")
    engine.info = None
    assert call(lab.app(engine), "GET", "/v1/models").json()["data"][0]["max_model_len"] is None


def test_tokenize_and_detokenize_give_the_text_back(lab: Any) -> None:
    text = "Hello 日本 <|im_end|>"
    answer = lab.post(
        lab.says(""), "/v1/tokenize", {"prompt": text, "return_token_strs": True}
    ).json()
    assert answer["tokens"] == lab.ids(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert answer["token_strs"][-1] == "<|im_end|>"
    back = lab.post(lab.says(""), "/v1/detokenize", {"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


def test_a_conversation_is_tokenized_as_chat_does(lab: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    engine = lab.says("Hi")
    usage = lab.post(engine, "/v1/chat/completions", {"messages": messages}).json()["usage"]
    answer = lab.post(engine, "/v1/tokenize", {"messages": messages}).json()
    assert answer["count"] == usage["prompt_tokens"]
    assert answer["token_strs"] is None
    shorter = {"messages": messages, "add_generation_prompt": False}
    assert lab.post(engine, "/v1/tokenize", shorter).json()["count"] < answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("tokenize", {"prompt": ["x"]}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [49152]}, "tokens"),
        ("detokenize", {"tokens": [1] * 2049}, "tokens"),
    ],
)
def test_bad_bodies_are_refused_by_name(lab: Any, path: str, body: Any, param: str) -> None:
    response = lab.post(lab.says(""), f"/v1/{path}", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_long_text_is_tokenized_in_a_thread_and_alike(lab: Any) -> None:
    text = "word " * 20_000
    answer = lab.post(lab.says(""), "/v1/tokenize", {"prompt": text}).json()
    assert answer["tokens"] == lab.ids(text)


def test_metrics_have_no_label_that_a_client_makes_up(lab: Any, call: Call) -> None:
    app = lab.app(lab.says("Hi there"), enable_metrics=True)
    call(app, "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    call(app, "GET", "/v1/made/up")
    call(app, "GET", "/made-up-too")
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
        "ktserve_engine_up 1.0",
        "ktserve_running_requests 1.0",
        "ktserve_queued_requests 2.0",
        'ktserve_pages{state="free"} 60.0',
        'ktserve_pages{state="evictable"} 30.0',
        'ktserve_pages{state="in_use"} 10.0',
        "ktserve_prompt_tokens_total 11.0",
        "ktserve_cached_tokens_total 12.0",
        "ktserve_generated_tokens_total 13.0",
        "ktserve_evicted_tokens_total 14.0",
        'ktserve_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0',
        'ktserve_time_to_first_token_seconds_count{endpoint="chat_completions"} 1.0',
        'ktserve_inter_token_latency_seconds_count{endpoint="chat_completions"} 2.0',
        'ktserve_e2e_request_latency_seconds_count{endpoint="chat_completions"} 1.0',
    ):
        assert line in lines
    assert "made" not in response.text


def test_metrics_are_off_by_default(lab: Any, call: Call) -> None:
    assert call(lab.app(lab.says("Hi")), "GET", "/metrics").status_code == 404


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/openapi.json", "/v1", "/v1/embeddings", "//v1/models"]
)
def test_unknown_paths_are_404s_in_openais_shape(lab: Any, call: Call, path: str) -> None:
    response = call(lab.app(lab.says("Hi")), "GET", path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_404_says_what_was_asked_for_and_where_the_routes_are(lab: Any, call: Call) -> None:
    response = call(lab.app(lab.says("Hi")), "PUT", "/chat/comp%1b[31mletions" + "x" * 500)
    message = response.json()["error"]["message"]
    assert message.startswith("PUT /chat/comp\\x1b[31mletionsxxx")
    assert "the routes are under /v1" in message
    assert len(message) < 250


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("OPTIONS", "/v1/chat/completions", {"POST"}),
        ("TRACE", "/v1/tokenize", {"POST"}),
        ("DELETE", "/v1/models", {"GET"}),
        ("POST", "/health", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_a_405_that_says_what_is_right(
    lab: Any, call: Call, method: str, path: str, allowed: set[str]
) -> None:
    response = call(lab.app(lab.says("Hi")), method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed
    error = response.json()["error"]
    assert error["code"] == "method_not_allowed"
    assert error["message"].startswith(f"{method} {path} is not allowed; the route takes ")


def test_health_and_ready_answer_to_head(lab: Any, call: Call) -> None:
    engine = lab.says("Hi")
    app = lab.app(engine)
    response = call(app, "HEAD", "/v1/models/tiny")
    assert (response.status_code, response.headers["allow"]) == (405, "GET")
    for path in ("/health", "/ready"):
        assert call(app, "HEAD", path).status_code == 200
    engine.info = None
    response = call(app, "HEAD", "/ready")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert call(app, "HEAD", "/health").status_code == 200


def test_a_bug_is_a_500_without_details(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    async def broken(*_args: object, **_options: object) -> str:
        raise RuntimeError("secret detail")

    app = lab.app(lab.says("Hi"))
    monkeypatch.setattr(app.state.service.tokenization, "encode", broken)

    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json={"prompt": "x"})

    response = asyncio.run(work())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
