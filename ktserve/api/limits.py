"""Whether a request is let in: the model's room, the tenant's limits, a server that is stopping."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ktserve.api.errors import ApiError
from ktserve.messages import EngineInfo
from ktserve.tenancy.shares import CacheSharing
from ktserve.tenancy.tenants import Tenant

BUSY_RETRY_S = 1
DRAINING_RETRY_S = 5


def fit(
    prompt_tokens: int,
    asked: int | None,
    field: str,
    info: EngineInfo,
    tenant: Tenant,
    sharing: CacheSharing,
    param: str,
) -> int:
    """How many tokens may be generated after a prompt of ``prompt_tokens``.

    Args:
        asked: what the request asks for; None is all that fits.
        field: the field that asks, for the message.
        sharing: how tenants share the page pool, for the message.
        param: the field that holds the prompt.

    Raises:
        ApiError: 400 with the numbers, when prompt and output together can never fit.
    """
    if prompt_tokens == 0:
        raise ApiError(
            400, f"{param} has no tokens; send at least one", code="empty_prompt", param=param
        )
    room, what, code = _room(info, tenant, sharing)
    if prompt_tokens + (asked or 1) > room:
        output = f"and {field} is {asked}, together {prompt_tokens + asked}" if asked else ""
        remedy = f"shorten the prompt or lower {field}" if asked else "shorten the prompt"
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens{' ' + output if output else ''}; "
            f"{what} is {room} tokens, prompt and output together: {remedy}",
            code=code,
            param=param if prompt_tokens >= room or asked is None else field,
        )
    return room - prompt_tokens if asked is None else asked


@dataclass
class Place:
    """What one request in flight holds of its tenant's room: one sequence until it asks for more.

    One sequence is one prompt's one choice, so that a batch or ``n`` is no way around a limit.
    """

    tenant: Tenant
    sequences: int
    _held: Counter[str]

    def take(self, sequences: int) -> None:
        """Hold ``sequences`` in all, at least as many as before.

        Raises:
            ApiError: 429 when the tenant's places are taken; 400 when the request alone needs
                more than the tenant has.
        """
        limit = self.tenant.limits.max_concurrent_requests
        if limit is not None and sequences > limit:
            raise ApiError(
                400,
                f"the request asks for {sequences} texts at once; the tenant's limit, "
                f"max_concurrent_requests, is {limit}: send fewer prompts or a lower n",
                code="too_many_sequences",
                param="n",
            )
        others = self._held[self.tenant.name] - self.sequences
        if limit is not None and others + sequences > limit:
            raise ApiError(
                429,
                f"the tenant has {others} requests in flight and asks for {sequences} more; its "
                f"limit, max_concurrent_requests, is {limit}: try again when one has ended",
                code="concurrency_limit",
                retry_after=BUSY_RETRY_S,
            )
        self._held[self.tenant.name] += sequences - self.sequences
        self.sequences = sequences


class Admissions:
    """Counts what is in flight, by tenant and in all, and lets no more in than may be.

    Attributes:
        draining: nothing more is let in.
    """

    def __init__(self) -> None:
        self._sequences: Counter[str] = Counter()
        self._requests = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """Let nothing more in."""
        self.draining = True

    async def idle(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()

    @contextmanager
    def admit(self, tenant: Tenant) -> Iterator[Place]:
        """Hold a place of ``tenant`` while a request is in flight, from before its body is read.

        Raises:
            ApiError: 503 while draining; 429 when the tenant's places are taken.
        """
        if self.draining:
            raise ApiError(
                503,
                "the server is stopping and takes no new requests; try again",
                code="draining",
                retry_after=DRAINING_RETRY_S,
            )
        place = Place(tenant, 0, self._sequences)
        place.take(1)
        self._requests += 1
        self._idle.clear()
        try:
            yield place
        finally:
            self._sequences[tenant.name] -= place.sequences
            self._requests -= 1
            if self._requests == 0:
                self._idle.set()


def _room(info: EngineInfo, tenant: Tenant, sharing: CacheSharing) -> tuple[int, str, str]:
    rooms = [
        (info.context_length, "the model's context_length", "context_length_exceeded"),
        (info.pool_tokens, "the server's page pool", "pool_exceeded"),
    ]
    # A file of tenants that has changed since the engine started may name one that it does not
    # know: the engine then checks by itself what it can give.
    if (capacity := info.capacity_tokens.get(tenant.name)) is not None:
        what = f"what the tenant can get of the server's page pool (--cache-sharing {sharing})"
        rooms.append((capacity, what, "tenant_pool_exceeded"))
    if tenant.limits.max_context is not None:
        rooms.append(
            (tenant.limits.max_context, "the tenant's limit, max_context,", "tenant_max_context")
        )
    return min(rooms, key=lambda room: room[0])
