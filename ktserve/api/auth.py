"""Whose request it is: from the API key alone."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from ktserve.api.errors import ApiError
from ktserve.api.service import Service
from ktserve.tenancy.tenants import AuthenticationError, Tenant


def service_of(request: Request) -> Service:
    """The service that the app was made with."""
    service: Service = request.app.state.service
    return service


async def authenticated(request: Request) -> Tenant:
    """The tenant whose key the request carries as ``Authorization: Bearer KEY``.

    Raises:
        ApiError: 401, a key is needed and this is none.
    """
    tenants = service_of(request).tenants
    headers = request.headers.getlist("authorization")
    if len(headers) > 1 and tenants.needs_key:
        # It would be a matter of taste who is asking.
        raise ApiError(
            401,
            f"the request has {len(headers)} Authorization headers; send one Authorization header",
            code="invalid_api_key",
        )
    key: str | None = None
    if headers:
        scheme, _, value = headers[0].partition(" ")
        if scheme.lower() == "bearer":
            key = value.strip()
    try:
        return tenants.authenticate(key)
    except AuthenticationError as error:
        raise ApiError(401, str(error), code="invalid_api_key") from None


Authenticated = Annotated[Tenant, Depends(authenticated)]
"""The parameter by which a route learns its tenant; there is no other way to one."""
