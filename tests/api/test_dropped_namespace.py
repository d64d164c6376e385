"""The report's bug, planted in the route: the request is built without its namespace."""

from __future__ import annotations

from typing import Any

import pytest

from ktserve.api import planning
from ktserve.messages import Request


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_a_route_that_forgets_the_namespace_answers_nobody(
    lab: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    engine = lab.says("Hi")
    assert lab.post(engine, path, body).status_code == 200
    assert len(engine.requests) == 1

    def forgetful(**fields: Any) -> Request:
        del fields["namespace"]
        return Request(**fields)

    monkeypatch.setattr(planning, "Request", forgetful)
    with pytest.raises(TypeError, match="namespace"):
        lab.post(engine, path, body)
    assert len(engine.requests) == 1  # nothing more has reached the engine
