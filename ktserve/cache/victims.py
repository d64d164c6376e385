"""The order in which one tenant's pages go: its free leaves by the policy's number.

A leaf's number changes only with a lease on it, and a leased node is in no order. So what stands
here is exact, and most leaves come with a higher number than all before them: they are appended to
a list, and leave it, at the cost of a few assignments however many there are. A policy's rank (see
`ktserve.cache.policies`) has a list of its own. A node that has just lost its last child comes
first or, where it was used since, in between; for these there is a heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from ktserve.cache.node import Node, Run, Waiting
from ktserve.cache.policies import RANK_BITS


class Victims:
    """Free leaves, the next victim first.

    Args:
        key: the policy.
    """

    __slots__ = ("_heap", "_key", "_ranks", "_runs", "_stale")

    def __init__(self, key: Callable[[Node], int]) -> None:
        self._key = key
        self._runs: dict[int, Run] = {}
        self._ranks: list[int] = []  # a heap: those of the runs, and some of former ones
        self._heap: list[Waiting] = []
        self._stale = 0  # entries in the heap that do not count any more

    def __iter__(self) -> Iterator[Node]:
        """Every node, in any order; changes nothing."""
        for run in self._runs.values():
            yield from run
        yield from (entry[2] for entry in self._heap if entry[2].queued is entry)

    def ordered(self) -> Iterator[Node]:
        """Every node, the next victim first; to be used up before anything changes."""
        runs = (node for rank in sorted(self._runs) for node in self._runs[rank])
        heap = sorted(entry for entry in self._heap if entry[2].queued is entry)
        return heapq.merge(runs, (entry[2] for entry in heap), key=self._key)

    def add(self, node: Node) -> None:
        """Put ``node`` in its place if it is a free leaf and not there yet."""
        if node.locks or node.children or node.parent is None or node.queued is not None:
            return
        key = self._key(node)
        run = self._run(key >> RANK_BITS)
        first, last = run.first, run.last
        if first is None or last is None:
            run.first = run.last = node
        elif key >= self._key(last):
            node.before, last.after, run.last = last, node, node
        elif key <= self._key(first):
            node.after, first.before, run.first = first, node, node
        else:
            node.queued = entry = (key, node.id, node)
            heapq.heappush(self._heap, entry)
            return
        node.queued = run

    def remove(self, node: Node) -> None:
        """Take ``node`` out, if it is there."""
        queued = node.queued
        if queued is None:
            return
        node.queued = None
        if isinstance(queued, Run):
            before, after = node.before, node.after
            if before is None:
                queued.first = after
            else:
                before.after = after
            if after is None:
                queued.last = before
            else:
                after.before = before
            node.before = node.after = None
            if queued.first is None:
                self._drop(queued)
            return
        self._stale += 1
        if self._stale > len(self._heap) // 2 + 16:
            self._heap = [entry for entry in self._heap if entry[2].queued is entry]
            heapq.heapify(self._heap)
            self._stale = 0

    def first(self) -> Node | None:
        """The next victim: the leaf whose last page goes first."""
        heap, ranks = self._heap, self._ranks
        while heap and heap[0][2].queued is not heap[0]:
            heapq.heappop(heap)
            self._stale -= 1
        while ranks and ranks[0] not in self._runs:
            heapq.heappop(ranks)
        node = self._runs[ranks[0]].first if ranks else None
        if heap and (node is None or heap[0][0] < self._key(node)):
            return heap[0][2]
        return node

    def reset(self, nodes: Iterator[Node]) -> None:
        """Make the order anew of the free leaves among ``nodes``, which are all that there are."""
        self._runs, self._ranks, self._heap, self._stale = {}, [], [], 0
        leaves = []
        for node in nodes:
            node.queued = node.before = node.after = None
            leaves.append(node)
        for node in sorted(leaves, key=self._key):
            self.add(node)

    def _run(self, rank: int) -> Run:
        run = self._runs.get(rank)
        if run is None:
            run = self._runs[rank] = Run(rank)
            heapq.heappush(self._ranks, rank)
        return run

    def _drop(self, run: Run) -> None:
        del self._runs[run.rank]
        if len(self._ranks) > 2 * len(self._runs) + 16:
            self._ranks = sorted(self._runs)
