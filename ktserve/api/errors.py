"""Which error body and status a failed request gets: OpenAI's shape, for every failure."""

from __future__ import annotations

import http

import msgspec
from starlette.responses import Response

from ktserve.logs import clean

SHOWN_CHARACTERS = 64
"""How much of a client's own text an error message repeats."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the body of a failed request, and in the last event of a failed stream."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status.
        message: for people: what is wrong, the limit, the remedy. Holds no prompt, key or salt.
        param: the request field at fault, where there is one.
        code: a stable word for programs.
        retry_after: seconds after which another try makes sense.
        close: the connection cannot be used for another request.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.close = close

    def body(self) -> bytes:
        """The JSON body."""
        detail = ErrorDetail(
            message=self.message, type=_error_type(self.status), param=self.param, code=self.code
        )
        return msgspec.json.encode(ErrorBody(error=detail))

    def response(self) -> Response:
        """The whole answer, with the headers that belong to its status."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == http.HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if self.close:
            headers["Connection"] = "close"
        return Response(
            self.body(), status_code=self.status, headers=headers, media_type="application/json"
        )


def invalid(param: str, problem: str, *, code: str = "invalid_value") -> ApiError:
    """The 400 that says that the field ``param`` has ``problem``."""
    return ApiError(400, f"{param} {problem}", code=code, param=param)


def shown(text: str) -> str:
    """A client's own text as an error message may repeat it: short, without control characters."""
    short = text[:SHOWN_CHARACTERS] + ("…" if len(text) > SHOWN_CHARACTERS else "")
    return clean(short.encode(errors="replace").decode())


def _error_type(status: int) -> str:
    if status == http.HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return "invalid_request_error"
