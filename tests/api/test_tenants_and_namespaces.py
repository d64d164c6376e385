"""Who a request belongs to, on every route, and what its body can and cannot change about that."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from rosters import with_keys

from ktserve.api import routes
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenants import Limits, Tenant, Tenants

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", CHAT),
    ("POST", COMPLETIONS),
    ("POST", "/v1/tokenize"),
    ("POST", "/v1/detokenize"),
    ("GET", "/v1/anything"),
    ("DELETE", "/v1/models"),
    ("HEAD", "/v1/models"),
    ("OPTIONS", CHAT),
    ("TRACE", "/v1/tokenize"),
    ("PROPFIND", "/v1/anything"),
    ("GET", "/v1"),
    ("HEAD", "/v1"),
    ("GET", "/v1/"),
]
Call = Callable[..., httpx.Response]


def two_tenants(**limits: Any) -> Tenants:
    acme, globex = Tenant("acme", limits=Limits(**limits)), Tenant("globex")
    return with_keys((acme, ["key-a", "key-b"]), (globex, ["key-g"]))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        {"Authorization": "key-a"},
        {"Authorization": "Basic key-a"},
        {"api-key": "key-a"},
        [("Authorization", "Bearer key-a"), ("Authorization", "Bearer key-g")],
    ],
)
def test_every_v1_route_needs_a_key(
    lab: Any, call: Call, method: str, path: str, headers: Any
) -> None:
    app = lab.app(lab.says("Hi"), two_tenants())
    response = call(app, method, path + "?api_key=key-a", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    if method != "HEAD":  # which has no body
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert "key-a" not in response.text


def test_two_keys_are_none_and_the_answer_says_so(lab: Any, call: Call) -> None:
    headers = [("Authorization", "Bearer key-a"), ("Authorization", "Bearer key-a")]
    response = call(lab.app(lab.says("Hi"), two_tenants()), "GET", "/v1/models", headers=headers)
    assert response.status_code == 401
    assert "send one Authorization header" in response.json()["error"]["message"]
    assert call(lab.app(lab.says("Hi")), "GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_v1_route_refuses_a_key_that_is_known(
    lab: Any, call: Call, method: str, path: str
) -> None:
    app = lab.app(lab.says("Hi"), two_tenants())
    assert call(app, method, path, headers=bearer("key-a")).status_code != 401


def test_every_route_under_v1_is_in_the_list_above() -> None:
    # A new route has to be put there, and so has to show that it asks for a key.
    declared = {route.path for route in routes.router.routes if isinstance(route, APIRoute)}
    assert declared == {
        "/v1/models",
        "/v1/models/{name:path}",
        CHAT,
        COMPLETIONS,
        "/v1/tokenize",
        "/v1/detokenize",
    }


def test_health_and_ready_are_open(lab: Any, call: Call) -> None:
    engine = lab.says("Hi")
    app = lab.app(engine, two_tenants())
    assert call(app, "GET", "/health").status_code == 200
    assert call(app, "GET", "/ready").status_code == 200
    engine.info = None
    response = call(app, "GET", "/ready")
    assert response.status_code == 503
    assert "starting" in response.json()["reason"]
    assert call(app, "GET", "/health").status_code == 200


def test_without_keys_everyone_is_the_default_tenant(lab: Any, call: Call) -> None:
    engine = lab.says("Hi")
    call(lab.app(engine), "POST", CHAT, json=HELLO, headers=bearer("anything"))
    assert engine.requests[0].namespace.tenant == "default"


def test_one_api_key_is_asked_for(lab: Any, call: Call) -> None:
    app = lab.app(lab.says("Hi"), api_key="secret")
    assert call(app, "POST", CHAT, json=HELLO).status_code == 401
    assert call(app, "POST", CHAT, json=HELLO, headers=bearer("secret")).status_code == 200


@pytest.mark.parametrize(
    ("key", "tenant"), [("key-a", "acme"), ("key-b", "acme"), ("key-g", "globex")]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_tenant_follows_the_key_alone(
    lab: Any, call: Call, key: str, tenant: str, path: str
) -> None:
    engine = lab.says("Hi")
    body = {**(HELLO if path == CHAT else {"prompt": "x"}), "user": "acme", "metadata": {"t": "x"}}
    headers = {**bearer(key), "X-Tenant": "acme", "OpenAI-Organization": "acme"}
    call(lab.app(engine, two_tenants()), "POST", path, json=body, headers=headers)
    assert engine.requests[0].namespace == Namespace(
        tenant=tenant, cache_salt=None, extra_key=None, adapter=None
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_salt_and_extra_key_are_taken_as_they_are(lab: Any, path: str) -> None:
    engine = lab.says("Hi")
    body = HELLO if path == CHAT else {"prompt": "x"}
    lab.post(engine, path, {**body, "cache_salt": " É", "extra_key": "É ", "n": 2})
    expected = Namespace(tenant="default", cache_salt=" É", extra_key="É ", adapter=None)
    assert [request.namespace for request in engine.requests] == [expected, expected]


def test_a_batch_takes_a_list_with_one_for_each_prompt(lab: Any) -> None:
    engine = lab.says("Hi")
    body = {
        "prompt": ["a", "b", "c"],
        "n": 2,
        "cache_salt": ["s", None, "t"],
        "extra_key": "k",
    }
    lab.post(engine, COMPLETIONS, body)
    pairs = [
        (request.namespace.cache_salt, request.namespace.extra_key) for request in engine.requests
    ]
    assert pairs == [("s", "k"), ("s", "k"), (None, "k"), (None, "k"), ("t", "k"), ("t", "k")]


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize(
    "value",
    [
        "",
        "\x00",
        "a\nb",
        "\x7f",
        "\ud800",
        "x" * 1025,
        "é" * 513,
        5,
        True,
        1.5,
        {},
        ["x"],
        [],
        [None],
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bad_values_are_refused_by_name(
    lab: Any, post_many: Callable[..., list[httpx.Response]], field: str, value: object, path: str
) -> None:
    engine = lab.says("Hi")
    body = {**(HELLO if path == CHAT else {"prompt": "x"}), field: value}
    (response,) = post_many(lab.app(engine), path, [json.dumps(body).encode()])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert engine.requests == []


@pytest.mark.parametrize("value", [["a"], ["a", "b", "c"], ["a", 5], ["a", ""], [["a"], "b"], []])
def test_bad_lists_are_refused_by_name(lab: Any, value: object) -> None:
    response = lab.post(lab.says("Hi"), COMPLETIONS, {"prompt": ["a", "b"], "extra_key": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "extra_key"


def test_values_at_the_limit_pass(lab: Any) -> None:
    for value in ("x" * 1024, "é" * 512, None):
        assert lab.post(lab.says("Hi"), CHAT, {**HELLO, "cache_salt": value}).status_code == 200


def test_a_tenants_context_is_limited(lab: Any, call: Call) -> None:
    engine = lab.says("Hi")
    app = lab.app(engine, two_tenants(max_context=100))
    body = {"prompt": [500] * 90, "max_tokens": 11}
    response = call(app, "POST", COMPLETIONS, json=body, headers=bearer("key-a"))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "tenant_max_context"
    assert "max_context, is 100 tokens" in response.json()["error"]["message"]
    response = call(app, "POST", COMPLETIONS, json=body, headers=bearer("key-g"))
    assert response.status_code == 200


def test_more_texts_than_the_tenant_may_ever_have_is_a_400(lab: Any, call: Call) -> None:
    app = lab.app(lab.says("Hi"), two_tenants(max_concurrent_requests=2))
    for n, status in ((3, 400), (2, 200)):
        response = call(app, "POST", CHAT, json={**HELLO, "n": n}, headers=bearer("key-a"))
        assert response.status_code == status


def test_neither_log_nor_repr_tells_text_key_or_salt(
    lab: Any, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    app = lab.app(lab.says("Answer"), two_tenants())
    body = {"messages": [{"role": "user", "content": "Prompt"}], "cache_salt": "SaltySalt"}
    call(app, "POST", CHAT, json=body, headers=bearer("key-a"))
    lines = [record.getMessage() for record in caplog.records if record.name == "ktserve.api"]
    assert len(lines) == 1
    assert "ns-" in lines[0]
    assert lines[0].endswith("finish stop")
    shown = caplog.text + repr(app.state.service)
    for secret in ("Prompt", "Answer", "SaltySalt", "key-a", "keykey"):
        assert secret not in shown
