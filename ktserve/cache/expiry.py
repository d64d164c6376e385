"""Which namespaces lay unused for longer than their tenant's ``cache_ttl``."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ktserve.cache.node import Tree

SECOND = 1_000_000_000
"""Ticks in a second."""


class Expiries:
    """When each tree with a time to live has to be looked at again.

    A tree is entered once, when it is opened; a use does not move its entry, which is put right
    when its time has come.
    """

    def __init__(self) -> None:
        self._due: list[tuple[int, int, Tree]] = []

    def __len__(self) -> int:
        return len(self._due)

    def watched(self) -> dict[int, int]:
        """When which tree is looked at, by the tree's index, for audits."""
        return {index: due for due, index, _ in self._due}

    def watch(self, tree: Tree) -> None:
        """Enter ``tree``, if its tenant has a time to live."""
        ttl = tree.account.quota.cache_ttl
        if ttl is not None:
            heapq.heappush(self._due, (tree.last_used + int(ttl * SECOND), tree.index, tree))

    def watch_all(self, trees: Iterable[Tree]) -> None:
        """Enter ``trees`` and no other."""
        self._due = []
        for tree in trees:
            self.watch(tree)

    def expired(self, now: int) -> list[Tree]:
        """The trees whose time is over; those that are gone or in use are passed over."""
        found: dict[int, Tree] = {}
        while self._due and self._due[0][0] <= now:
            tree = heapq.heappop(self._due)[2]
            ttl = tree.account.quota.cache_ttl
            if ttl is None or tree.account.trees.get(tree.namespace) is not tree:
                continue
            due = (now if tree.leases else tree.last_used) + int(ttl * SECOND)
            if due <= now:
                found[tree.index] = tree
            else:
                heapq.heappush(self._due, (due, tree.index, tree))
        return list(found.values())

    @property
    def first(self) -> int | None:
        """The tick before which `expired` finds nothing; None: it never will."""
        return self._due[0][0] if self._due else None
