"""What every route with a body does first: take the tenant's place, then read, check and answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ktserve.api.auth import service_of
from ktserve.api.bodies import read_object
from ktserve.api.limits import Place
from ktserve.api.service import Service
from ktserve.tenancy.tenants import Tenant

Answer = Callable[[Service, Place, Mapping[str, object]], Awaitable[Response]]


class AdmittedResponse(Response):
    """Answers ``request`` by ``answer`` while a place of ``tenant`` is held.

    Reading a body, rendering and tokenizing cost time that other tenants wait for, so they happen
    inside the place as generating does. All of it happens inside one call of this object, so that
    the place is given back when the answer has been sent, or has failed, and not before.
    """

    def __init__(self, request: Request, tenant: Tenant, answer: Answer) -> None:
        super().__init__()
        self._request = request
        self._tenant = tenant
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = service_of(self._request)
        with service.admissions.admit(self._tenant) as place:
            body = await read_object(self._request, service.settings.max_request_bytes)
            response = await self._answer(service, place, body)
            await response(scope, receive, send)
