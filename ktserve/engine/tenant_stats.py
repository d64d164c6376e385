"""What the engine tells of each tenant's part of the cache, and how often."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ktserve.cache.accounts import Account
from ktserve.cache.manager import CacheManager
from ktserve.messages import MAX_EVICTION_PAIRS, TenantCache

TOLD_EVERY_S = 0.5
"""A busy engine looks at its tenants that often, and not at every step."""


class TenantStats:
    """The tenants' rows for the API process, of which each is told again when it has changed.

    Args:
        clock: seconds that never go back.
        max_pairs: of two tenants, the one evicting the other, that are told apart. The first that
            happen are, and stay so: a counter that left the list would seem to be gone.
    """

    def __init__(
        self,
        cache: CacheManager,
        clock: Callable[[], float],
        *,
        max_pairs: int = MAX_EVICTION_PAIRS,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._due = clock()
        self._told: dict[str, Hashable] = {}
        self._evictors: dict[str, set[str]] = {}
        self._pairs_left = max_pairs

    def forget(self) -> None:
        """Tell every tenant anew at the next step: who was told of them is gone."""
        self._told.clear()
        self._due = self._clock()

    def changed(self, *, idle: bool) -> tuple[TenantCache, ...]:
        """The tenants that changed since they were last told, if it is time to tell them.

        A step between two times costs one look at the clock. A time costs a fifth of a microsecond
        for each tenant, and a few for each that changed.

        Args:
            idle: no step follows; this is what will be known until something happens.
        """
        now = self._clock()
        if not idle and now < self._due:
            return ()
        self._due = now + TOLD_EVERY_S
        rows: list[TenantCache] = []
        for account in self._cache.accounts:
            counts = _counts(account)
            if self._told.get(account.tenant) != counts:
                self._told[account.tenant] = counts
                rows.append(self._row(account))
        return tuple(rows)

    def _row(self, account: Account) -> TenantCache:
        size = self._cache.page_size
        return TenantCache(
            name=account.tenant,
            resident=account.resident * size,
            locked=account.locked * size,
            private=account.private * size,
            floor=account.share.floor * size,
            cap=account.share.cap * size,
            namespaces=len(account.trees),
            nodes=account.nodes,
            lookups=account.lookups,
            hits=account.hits,
            prompt_tokens=account.prompt_tokens,
            hit_tokens=account.hit_tokens,
            evicted=account.evicted * size,
            caused=account.caused * size,
            evicted_by=self._evicted_by(account),
        )

    def _evicted_by(self, account: Account) -> dict[str, int]:
        by = account.evicted_by
        always = (account.tenant, "")
        others = self._evictors.setdefault(account.tenant, set())
        if self._pairs_left:
            # Short, since all that came before are told apart.
            new = [one for one in by if one not in others and one not in always]
            new = new[: self._pairs_left]
            others.update(new)
            self._pairs_left -= len(new)
        size = self._cache.page_size
        return {one: by[one] * size for one in (*always, *others) if one in by}


def _counts(account: Account) -> Hashable:
    """What is the same only while the account's row is."""
    return (
        account.lookups,
        account.resident,
        account.locked,
        account.private,
        account.evicted,
        account.caused,
        account.nodes,
        len(account.trees),
        account.share,
    )
