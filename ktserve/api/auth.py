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
    headers = request.headers.getlist("authorization")
    key: str | None = None
    # With two of them it would be a matter of taste who is asking.
    if len(headers) == 1:
        scheme, _, value = headers[0].partition(" ")
        if scheme.lower() == "bearer":
            key = value.strip()
    try:
        return service_of(request).tenants.authenticate(key)
    except AuthenticationError as error:
        raise ApiError(401, str(error), code="invalid_api_key") from None


Authenticated = Annotated[Tenant, Depends(authenticated)]
"""The parameter by which a route learns its tenant; there is no other way to one."""
