"""One tenant, as the server knows it once its key is checked."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use at most; None is no limit of its own.

    Attributes:
        max_concurrent_requests: sequences in flight at once, waiting ones included.
        max_context: tokens of one sequence, prompt and output together.
    """

    max_concurrent_requests: int | None = None
    max_context: int | None = None


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's part of the page pool.

    Attributes:
        weight: its share against the others', above 0.
        cache_floor: the part of the pool, 0 to 1, that it keeps; None follows from the weight.
        cache_cap: the most of the pool that it holds, above 0 to 1; None is all of it.
        cache_ttl: seconds that a namespace may lie unused; None is for ever.
    """

    weight: float = 1.0
    cache_floor: float | None = None
    cache_cap: float | None = None
    cache_ttl: float | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant without its keys.

    Attributes:
        name: unique; the tenant field of its namespaces.
        label: for people, or None. Whoever shows it cleans it.
        quota: its part of the page pool.
    """

    name: str
    label: str | None = None
    quota: Quota = field(default_factory=Quota)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """A beginning of prompts that the operator makes public for the tenants it names.

    Attributes:
        name: unique.
        tenants: who reads it.
        system: the text of a system message, as a chat begins with it; or
        text: the beginning of a prompt as it is. One of the two is set.
    """

    name: str
    tenants: tuple[str, ...]
    system: str | None = None
    text: str | None = None
