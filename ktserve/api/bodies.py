"""A request's body: read within the limit, and decoded to one JSON object or refused."""

from __future__ import annotations

import asyncio
import json
from typing import cast

from starlette.requests import ClientDisconnect, Request

from ktserve.api.checks import json_type
from ktserve.api.disconnects import ClientGone
from ktserve.api.errors import ApiError, shown

INLINE_BYTES = 64 * 1024
"""Bodies up to this size are decoded at once, in well under a millisecond a KiB."""


async def read_object(request: Request, limit: int) -> dict[str, object]:
    """The JSON object in the body of ``request``, which may have ``limit`` bytes.

    Raises:
        ApiError: 400, 413 or 415.
        ClientGone: the client went away before it had sent everything.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A web page can post other types to a server on this machine without asking first.
        raise ApiError(
            415, "send the body as Content-Type: application/json", code="unsupported_media_type"
        )
    for encoding in request.headers.getlist("content-encoding"):
        if encoding.strip().lower() not in {"", "identity"}:
            raise ApiError(
                415,
                f"the body has the Content-Encoding '{shown(encoding)}'; send it as it is, without "
                "that header",
                code="unsupported_media_type",
            )
    data = await _read(request, limit)
    if len(data) <= INLINE_BYTES:
        return _decode(data)
    return await asyncio.to_thread(_decode, data)


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(
        413,
        f"the body is larger than {limit} bytes; send a smaller one, or start the server with a "
        "larger --max-request-bytes",
        code="request_too_large",
        close=True,
    )
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise too_large
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > limit:
                raise too_large
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(data)


def _decode(data: bytes) -> dict[str, object]:
    try:
        # Not-a-number and infinity come through here: the field that holds one refuses it by name.
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise _not_json(f"it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except ValueError:
        raise _not_json("it holds a number that is too long") from None
    if not isinstance(value, dict):
        raise ApiError(
            400, f"the body must be a JSON object, not {json_type(value)}", code="invalid_json"
        )
    return cast(dict[str, object], value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose names differ. What reads the body before us may have taken the other one."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ApiError(400, "the body has a field twice; send each once", code="duplicate_field")
    return fields


def _not_json(problem: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {problem}", code="invalid_json")
