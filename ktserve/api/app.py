"""The HTTP application: routes, what is open to all, and the shape of every failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktserve.api import metrics, routes
from ktserve.api.auth import authenticated, service_of
from ktserve.api.disconnects import ClientGone
from ktserve.api.errors import ApiError, shown
from ktserve.api.generation import Engine
from ktserve.api.limits import Admissions
from ktserve.api.metrics import Metrics
from ktserve.api.schemas import Status
from ktserve.api.service import STARTING_RETRY_S, Service
from ktserve.api.tokenization import Tokenization
from ktserve.config import Settings
from ktserve.tenancy.tenants import Tenants

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("ktserve.api")

CLIENT_GONE = 499
"""The status under which a request is counted whose client did not wait for the answer."""


def create_app(
    settings: Settings,
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    tenants: Tenants,
    pseudonym_key: bytes,
    model: str,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The application of one server; its `Service` is in ``app.state.service``.

    Args:
        pseudonym_key: under which namespaces are named in logs.
        model: the name by which clients call the model.

    Raises:
        UnsupportedTokenizer: the tokenizer's tokens cannot be turned into text one by one.
    """
    # No interactive documentation: its pages load scripts from elsewhere.
    app = FastAPI(
        title="ktserve", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    service = Service(
        settings=settings,
        engine=engine,
        tokenization=Tokenization(tokenizer),
        tenants=tenants,
        model=model,
        pseudonym_key=pseudonym_key,
        admissions=Admissions(),
        metrics=Metrics(engine),
        created=int(time.time()),
        clock=clock,
    )
    app.state.service = service
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    app.add_api_route("/health", _health, methods=["GET", "HEAD"])
    app.add_api_route("/ready", _ready, methods=["GET", "HEAD"])
    if settings.enable_metrics:
        app.add_api_route("/metrics", _metrics, methods=["GET"])
    app.include_router(routes.router)
    app.add_middleware(_CountAnswers, metrics=service.metrics)
    return app


async def _health() -> Response:
    """The process is alive."""
    return _status(200, Status(status="ok"))


async def _ready(request: Request) -> Response:
    """The server can take requests now, or why not."""
    service = service_of(request)
    if service.admissions.draining:
        return _status(503, Status(status="not ready", reason="the server is stopping"))
    if service.engine.info is None:
        reason = "the engine is starting, or starting again"
        return _status(503, Status(status="not ready", reason=reason))
    return _status(200, Status(status="ready"))


async def _metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(service_of(request).metrics.text(), media_type=metrics.CONTENT_TYPE)


def _status(status: int, body: Status) -> Response:
    headers = {} if status == 200 else {"Retry-After": str(STARTING_RETRY_S)}
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that there is none for.

    Under /v1 that needs a key too, whatever the method: what exists there is for tenants to know.
    """
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    if path == "/v1" or path.startswith("/v1/"):
        try:
            await authenticated(request)
        except ApiError as refusal:
            return refusal.response()
    what, headers = f"{shown(request.method)} {shown(path)}", error.headers or {}
    if error.status_code == 405:
        # RFC 9110, section 15.5.6: the answer has to name what is allowed.
        problem = ApiError(
            405,
            f"{what} is not allowed; the route takes {headers['Allow']}",
            code="method_not_allowed",
        )
    else:
        problem = ApiError(
            error.status_code,
            f"{what} does not exist in this version; the routes are under /v1, for example "
            "/v1/chat/completions, and beside it /health and /ready",
            code="unknown_url",
        )
    response = problem.response()
    response.headers.update(headers)
    return response


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    # Nobody reads it.
    return Response(status_code=CLIENT_GONE)


async def _on_bug(_request: Request, _error: Exception) -> Response:
    # uvicorn logs the traceback; Starlette raises the error again after this answer.
    return ApiError(500, "the server failed; this is a bug", code="internal_error").response()


class _CountAnswers:
    """Counts every request under its route's own path, so that no client makes up a label."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = scope.get("route")
            self._metrics.answered(getattr(route, "path", "other"), status)
