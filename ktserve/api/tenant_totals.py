"""The tenants' counters of the cache, over all lives of the engine that this process has seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ktserve.messages import MAX_EVICTION_PAIRS, TenantCache

SYSTEM = "@system"
"""Who evicts for no tenant: limits, times to live, flushes. '@' is in no tenant's name."""

OTHER = "@other"
"""The evictors of one tenant that are not told apart."""


@dataclass(slots=True)
class TenantTotal:
    """One tenant's counters; they never go back.

    Attributes:
        lookups: requests that were looked up.
        prompt_tokens: tokens that they asked for.
        hit_tokens: tokens that they found.
        evicted: tokens that it lost, by the evictor's name, `SYSTEM` or `OTHER`.
    """

    lookups: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted: Counter[str] = field(default_factory=Counter)


class TenantTotals:
    """Adds up what one engine after the other tells.

    A tenant is one of the engine's, and those are the operator's; no text of a client is here.

    Args:
        max_pairs: of two tenants, the one evicting the other, that are told apart.

    Attributes:
        totals: by tenant.
        now: the newest that the ready engine told of each tenant.
    """

    def __init__(self, *, max_pairs: int = MAX_EVICTION_PAIRS) -> None:
        self.totals: dict[str, TenantTotal] = {}
        self.now: dict[str, TenantCache] = {}
        self._pairs_left = max_pairs

    def add(self, rows: Iterable[TenantCache]) -> None:
        """Take in what the ready engine tells."""
        for row in rows:
            before = self.now.get(row.name)
            self.now[row.name] = row
            total = self.totals.setdefault(row.name, TenantTotal())
            total.lookups += row.lookups - (before.lookups if before else 0)
            total.prompt_tokens += row.prompt_tokens - (before.prompt_tokens if before else 0)
            total.hit_tokens += row.hit_tokens - (before.hit_tokens if before else 0)
            evicted = row.evicted - (before.evicted if before else 0)
            if evicted:
                self._add_evicted(row, evicted, before.evicted_by if before else {})

    def engine_lost(self) -> None:
        """The engine is gone; the next one counts from 0."""
        self.now.clear()

    def _add_evicted(self, row: TenantCache, evicted: int, before: dict[str, int]) -> None:
        totals = self.totals[row.name].evicted
        for evictor, tokens in row.evicted_by.items():
            added = tokens - before.get(evictor, 0)
            name = evictor or SYSTEM
            if added and self._told_apart(row.name, name):
                totals[name] += added
                evicted -= added
        if evicted:
            totals[OTHER] += evicted

    def _told_apart(self, victim: str, evictor: str) -> bool:
        if evictor in (victim, SYSTEM) or evictor in self.totals[victim].evicted:
            return True
        # Each life of the engine has its own first pairs.
        if not self._pairs_left:
            return False
        self._pairs_left -= 1
        return True
