"""How the forest is now, in slices between which it goes on, for `ktserve.cache.shadow.Shadow`.

A tree is walked a slice at a time. What happens to it meanwhile makes a node's state old that was
told before; so the walk is followed by another one, of what was used since the first began, and so
on until one fits into a single slice. A node is never older than a node below it, so that such a
walk turns back at the first node that was not used. It finds new nodes too, and those that a split
has moved. Only what eviction took from a leaf is no use of it: that is read from the records.
"""

from __future__ import annotations

from collections.abc import Iterator

from ktserve.cache.forest import RadixForest
from ktserve.cache.node import Node, Tree
from ktserve.cache.records import Kind, Records
from ktserve.cache.shadow import NodeState, Slice, TreePart

SLICE_NODES = 1000
"""Nodes in a slice: about a millisecond of the engine's time."""

_EVICTED = int(Kind.EVICTED)


def snapshot(forest: RadixForest, records: Records, nodes: int = SLICE_NODES) -> Iterator[Slice]:
    """The whole forest. Between two slices it may go on, and every slice counts from its ``seq``.

    Args:
        records: where the forest tells its changes.
        nodes: a slice is full with so many.
    """
    parts: list[TreePart] = []
    room = nodes
    trees = list(forest.trees())
    yield Slice(records.next_seq, [])
    for tree in trees:
        walk = _Walk(tree, forest, records)
        while forest.tree(tree.namespace) is tree:
            part = walk.part(room)
            parts.append(part)
            room -= len(part.nodes) + 1
            if room <= 0:
                yield Slice(records.next_seq, parts)
                parts, room = [], nodes
            if part.last:
                break
    yield Slice(records.next_seq, parts)


class _Walk:
    """One tree's parts."""

    def __init__(self, tree: Tree, forest: RadixForest, records: Records) -> None:
        self._tree = tree
        self._forest = forest
        self._records = records
        self._size = forest.page_size
        self._since = 0
        self._first = True
        self._publics: dict[int, int] = {}
        self._start()

    def part(self, most: int) -> TreePart:
        """Up to about ``most`` further nodes as they are now."""
        tree, first = self._tree, self._first
        self._first = False
        states, gone = self._evicted()
        if gone is None:
            # The records do not reach back to what was told: it is told anew.
            self._start()
            first, self._first, states, gone = True, False, [], []
        fresh = not self._stack
        if fresh:
            self._begin_round()
        stack, told = self._stack, self._told
        while stack and len(states) < most:
            node, moved = stack.pop()
            if node.gone:
                continue
            known = node.id in told
            used = node.last_used > self._since
            if not used and known and not moved:
                continue
            told[node.id] = node
            states.append(_state(node, self._size, self._publics.get(node.id, 0)))
            if used or not known:
                # Below a node that is new there may be a part that a split has put there.
                stack.extend((child, not known) for child in node.children.values())
        # Nothing came between if this part began with the walk and ended it.
        whole = fresh and not stack
        return TreePart(
            tree.index, tree.account.index, tree.leases, tree.last_used, states, gone, first, whole
        )

    def _start(self) -> None:
        self._told: dict[int, Node] = {}
        self._first = True
        self._seq = self._records.next_seq
        self._began = -1
        self._stack: list[tuple[Node, bool]] = []

    def _begin_round(self) -> None:
        self._since, self._began = self._began, self._forest.tick
        tree = self._tree
        self._publics = {root.id: public for public, root in tree.grafts.items()}
        # From the end: the root where prompts begin comes first.
        self._stack = [(root, False) for root in reversed(list(tree.roots()))]

    def _evicted(self) -> tuple[list[NodeState], list[int] | None]:
        """The told nodes from which eviction has taken since the part before, and of them those
        that are gone; None for these where records were lost."""
        records, lost = self._records.since(self._seq)
        self._seq = self._records.next_seq
        if lost:
            return [], None
        states: list[NodeState] = []
        gone: list[int] = []
        for record in records:
            if record.kind != _EVICTED or record.namespace != self._tree.index:
                continue
            node = self._told.get(record.node)
            if node is None:
                continue
            if node.gone:
                gone.append(node.id)
                del self._told[node.id]
            else:
                states.append(_state(node, self._size, 0))
        return states, gone


def _state(node: Node, page_size: int, public: int) -> NodeState:
    return NodeState(
        node.id,
        0 if node.parent is None else node.parent.id,
        public,
        node.size * page_size,
        node.locks,
        node.last_used,
        node.created,
        node.hits,
    )
