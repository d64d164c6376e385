"""The field ``cache``: what reaches the engine, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ktserve.messages import CacheOptions

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    COMPLETIONS: {"prompt": ["one", "two"], "n": 2},
}

Post = Callable[..., list[httpx.Response]]


@pytest.fixture
def post(lab: Any, post_many: Post) -> Post:
    """Bodies with each of some values of ``cache``, posted to one application."""

    def work(engine: Any, path: str, values: list[object], policy: str) -> list[httpx.Response]:
        bodies = [json.dumps({**BODIES[path], "cache": value}).encode() for value in values]
        return post_many(lab.app(engine, radix_eviction_policy=policy), path, bodies)

    return work


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_request_carries_what_cache_asks_for(lab: Any, post: Post, path: str) -> None:
    asked: list[tuple[object, CacheOptions]] = [
        (None, CacheOptions()),
        ({}, CacheOptions()),
        ({"insert": None, "lookup": None, "priority": None}, CacheOptions()),
        ({"insert": True, "lookup": True, "priority": 0}, CacheOptions()),
        ({"insert": False}, CacheOptions(insert=False)),
        ({"lookup": False}, CacheOptions(lookup=False)),
        ({"priority": 100}, CacheOptions(priority=100)),
        (
            {"insert": False, "lookup": False, "priority": 1},
            CacheOptions(insert=False, lookup=False, priority=1),
        ),
    ]
    engine = lab.says("Hi")
    responses = post(engine, path, [value for value, _ in asked], "priority")
    assert {response.status_code for response in responses} == {200}
    each = 1 if path == CHAT else 4
    assert [request.cache for request in engine.requests] == [
        options for _, options in asked for _ in range(each)
    ]


def test_without_the_field_the_cache_is_used(lab: Any) -> None:
    engine = lab.says("Hi")
    assert lab.post(engine, CHAT, BODIES[CHAT]).status_code == 200
    assert engine.requests[0].cache == CacheOptions(insert=True, lookup=True, priority=0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_bad_member_is_refused_by_name(lab: Any, post: Post, path: str) -> None:
    bad: list[tuple[object, str, str]] = [
        (5, "cache", "must be an object"),
        ([{}], "cache", "must be an object"),
        (False, "cache", "must be an object"),
        ({"inserts": False}, "cache.inserts", "did you mean 'insert'?"),
        ({"salt": "x"}, "cache.salt", "unknown field 'cache.salt'"),
        ({"insert": 0}, "cache.insert", "must be true or false"),
        ({"lookup": "no"}, "cache.lookup", "must be true or false"),
        ({"priority": 101}, "cache.priority", "must be from 0 to 100, not 101"),
        ({"priority": -1}, "cache.priority", "must be from 0 to 100"),
        ({"priority": True}, "cache.priority", "must be a whole number"),
        ({"priority": 1.0}, "cache.priority", "must be a whole number"),
    ]
    engine = lab.says("Hi")
    responses = post(engine, path, [value for value, _, _ in bad], "priority")
    for response, (_, param, says) in zip(responses, bad, strict=True):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert says in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo"])
def test_a_priority_that_nothing_looks_at_is_refused(lab: Any, post: Post, policy: str) -> None:
    engine = lab.says("Hi")
    passes, response = post(engine, CHAT, [{"priority": 0}, {"priority": 1}], policy)
    assert passes.status_code == 200
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("cache.priority", "unsupported_parameter")
    assert f"this server evicts by {policy}" in error["message"]
    assert "--radix-eviction-policy priority" in error["message"]
    assert len(engine.requests) == 1
