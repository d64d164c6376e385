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
class Tenant:
    """A tenant without its keys.

    Attributes:
        name: unique; the tenant field of its namespaces.
        label: for people, or None. Whoever shows it cleans it.
        weight: its share against the others', above 0. Kept for the sharing modes of the pool;
            nothing in this version reads it.
    """

    name: str
    label: str | None = None
    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)
