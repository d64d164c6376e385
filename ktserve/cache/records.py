"""What happened to the forest, record by record, for whoever follows it from outside.

The forest emits and does not know who reads. The records alone are enough to rebuild its shape,
its locks, ages and counts (`ktserve.cache.shadow`); they hold no token and no page id. Inside one
operation a namespace's OPENED comes before anything of its tree and CLOSED last, a SPLIT before the
LEASED that needed it, and INSERTED or LENGTHENED before MOVED.
"""

from __future__ import annotations

import itertools
from collections import deque
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a record tells; the fields that are not named are 0."""

    OPENED = 1
    """A namespace has a tree: ``node`` is its root, ``tokens`` the index of its tenant."""
    CLOSED = 2
    """That tree is gone."""
    GRAFTED = 3
    """The tree has another root, ``node``, behind the public prefix with the id ``tokens``;
    ``parent`` is the tree's first root."""
    LEASED = 4
    """A lease ends at ``node``: one lock more from there to the root, all of which were used at
    ``tick``; with the reason LOOKUP also one hit more for each. ``tokens`` were found."""
    SPLIT = 5
    """``node`` is the new upper part of ``parent``, which stays the lower one; it has ``tokens``
    and for the rest what the lower part has: locks, ages, hits."""
    INSERTED = 6
    """``node`` is a new leaf below ``parent`` with ``tokens``: not locked, never hit."""
    LENGTHENED = 7
    """The leaf ``node`` has ``tokens`` more."""
    MOVED = 8
    """A lease went from ``parent`` to ``node``: locks and ages as for LEASED, and one lock less
    from ``parent`` to the root."""
    RELEASED = 9
    """A lease at ``node`` ended: one lock less from there to the root, all used until ``tick``."""
    EVICTED = 10
    """``node`` lost ``tokens`` at its end, and is gone if none are left."""
    REPAIRED = 11
    """The books were recounted after an internal error. What was known before does not count."""


class Why(IntEnum):
    """The reason in a record."""

    NONE = 0
    LOOKUP = 1
    """LEASED: a request was looked up."""
    RESUMED = 2
    """LEASED: a request goes on that was looked up before; not a use of its own."""
    PINNED = 3
    """LEASED: by an operator."""
    OWN = 10
    """EVICTED: for a request of the same tenant."""
    OTHER = 11
    """EVICTED: for a request of another tenant."""
    FLUSHED = 12
    EXPIRED = 13
    """EVICTED: its namespace lay unused for longer than the tenant's cache_ttl."""
    NAMESPACES = 14
    """EVICTED: the tenant has too many namespaces."""
    NODES = 15
    """EVICTED: the tenant has too many nodes."""
    QUOTA = 16
    """EVICTED: the tenant's part of the pool became smaller."""


class Record(NamedTuple):
    """One change.

    Attributes:
        seq: counts the records of a life of the engine, from 0, without a gap.
        namespace: the tree's index.
        request: for whom it happened; 0 where for none.
        tick: nanoseconds of the engine's clock, larger with each operation.
    """

    seq: int
    kind: int
    node: int
    parent: int
    namespace: int
    tokens: int
    reason: int
    request: int
    tick: int


class Records:
    """A ring of the newest records.

    Args:
        capacity: records that it holds; each takes about 200 bytes.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        if capacity < 1:
            raise ValueError(f"a ring of {capacity} records cannot hold one; the least is 1")
        self._ring: deque[tuple[int, ...]] = deque(maxlen=capacity)
        self._append = self._ring.append
        self._count = itertools.count()

    def emit(
        self,
        kind: int,
        node: int,
        parent: int,
        namespace: int,
        tokens: int,
        reason: int,
        request: int,
        tick: int,
    ) -> None:
        """Add one; the oldest makes room."""
        self._append(
            (next(self._count), kind, node, parent, namespace, tokens, reason, request, tick)
        )

    @property
    def next_seq(self) -> int:
        """The number that the next record gets."""
        return self._ring[-1][0] + 1 if self._ring else 0

    def since(self, seq: int) -> tuple[list[Record], int]:
        """The records from ``seq`` on that are still held, and how many of them are lost."""
        if not self._ring:
            return [], 0
        lost = max(0, self._ring[0][0] - seq)
        # From the newest back: a reader that keeps up pays for what is new and not for the ring.
        count = min(len(self._ring), max(0, self.next_seq - seq))
        newest = [Record._make(one) for one in itertools.islice(reversed(self._ring), count)]
        newest.reverse()
        return newest, lost
