"""The memory of what was evicted, so that a miss can say so.

A ghost stands where an evicted page hung in its tree: behind a node, at a depth, with a hash of the
page's tokens. It is found by a lookup that ends there and would go on with that page. There are no
tokens in it, and a wrong find, possible only if two 64-bit hashes collide, gives a wrong
explanation and nothing else. Each tenant has its own, so that no other one's evictions change what
it is told.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ktserve.cache.node import Node

GHOSTS = 1024
"""Evictions of one tenant that are remembered; each takes about 250 bytes."""


class Ghost(NamedTuple):
    """An eviction.

    Attributes:
        tick: when it was.
        why: a `ktserve.cache.records.Why`.
    """

    tick: int
    why: int


class Ghosts:
    """The newest evictions.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int = GHOSTS) -> None:
        self._capacity = capacity
        # Not a dict: finding the oldest of one walks over all that were removed before it.
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def add(self, above: Node, depth: int, page: bytes, tick: int, why: int) -> None:
        """Note that ``page`` was evicted, which was ``depth`` pages below the root of its tree.

        Args:
            above: the node in which it was, or if that is gone the one above.
        """
        ghosts = self._ghosts
        place = _place(above, depth, page)
        ghosts[place] = Ghost(tick, why)
        ghosts.move_to_end(place)  # so that the order is by time
        if len(ghosts) > self._capacity:
            ghosts.popitem(last=False)

    def find(self, above: Node, depth: int, page: bytes) -> Ghost | None:
        """The eviction of ``page`` from there, if it is remembered."""
        return self._ghosts.get(_place(above, depth, page))

    def clear(self) -> None:
        """Forget all."""
        self._ghosts.clear()


def _place(above: Node, depth: int, page: bytes) -> int:
    if above.parent is not None:
        return hash((above.id, depth, page))
    # A root goes with its tree and comes back as another node.
    tree = above.tree
    if above is tree.root:
        return hash((tree.namespace, None, page))
    graft = next((public for public, root in tree.grafts.items() if root is above), None)
    return hash((tree.namespace, graft, page))
