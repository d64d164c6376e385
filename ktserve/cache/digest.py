"""A check that a copy of the forest is the forest: totals, and a digest of some nodes in turn.

To compare every node at once would cost the engine a walk over all of them. So each time the next
thousand are taken, in a walk that goes on from one time to the next; with every round of it all of
them were compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ktserve.cache.shadow import Shadow

if TYPE_CHECKING:
    from ktserve.cache.forest import RadixForest
    from ktserve.cache.node import Node, Tree

DIGEST_NODES = 1000

Compared = tuple[int, int, int, int, int, int, int, int]
"""A node's id, parent (0 of a root), tokens, locks, hits, last use, creation, count of children."""


class Totals(NamedTuple):
    """A forest in numbers.

    Attributes:
        nodes: without roots.
        resident: tokens, and so is ``locked``.
    """

    trees: int
    nodes: int
    resident: int
    locked: int
    leases: int


def digest_nodes(nodes: Iterable[Compared]) -> bytes:
    """16 bytes that differ where any number of any node does, or their order."""
    packed = array("q")
    for node in nodes:
        packed.extend(node)
    return hashlib.blake2b(packed.tobytes(), digest_size=16).digest()


def totals(forest: RadixForest) -> Totals:
    """Those of the live forest."""
    accounts = forest.accounts
    trees = list(forest.trees())
    return Totals(
        len(trees),
        sum(account.nodes for account in accounts),
        accounts.resident * forest.page_size,
        accounts.locked * forest.page_size,
        sum(tree.leases for tree in trees),
    )


class ForestCursor:
    """A walk over the live forest that goes on from call to call, round after round."""

    def __init__(self, forest: RadixForest) -> None:
        self._forest = forest
        self._trees: list[Tree] = []
        self._stack: list[Node] = []

    def take(self, most: int = DIGEST_NODES) -> tuple[list[int], bytes]:
        """The ids of up to ``most`` nodes, roots among them, and their digest. Changes nothing."""
        size = self._forest.page_size
        found: list[Compared] = []
        if not self._trees and not self._stack:
            self._trees = list(self._forest.trees())
        while len(found) < most and (self._stack or self._trees):
            if not self._stack:
                tree = self._trees.pop()
                if self._forest.tree(tree.namespace) is tree:
                    self._stack.extend(tree.roots())
                continue
            node = self._stack.pop()
            if node.gone or self._forest.tree(node.tree.namespace) is not node.tree:
                continue
            self._stack.extend(node.children.values())
            found.append(
                (
                    node.id,
                    0 if node.parent is None else node.parent.id,
                    node.size * size,
                    node.locks,
                    node.hits,
                    node.last_used,
                    node.created,
                    len(node.children),
                )
            )
        return [node[0] for node in found], digest_nodes(found)


def difference(shadow: Shadow, expected: Totals, ids: Iterable[int], digest: bytes) -> str | None:
    """What of ``shadow`` is not as the forest was at the same record, in words; None: nothing."""
    trees = shadow.trees.values()
    found = Totals(
        len(trees),
        sum(tree.nodes for tree in trees),
        sum(tree.resident for tree in trees),
        sum(tree.locked for tree in trees),
        sum(tree.leases for tree in trees),
    )
    if found != expected:
        parts = (
            f"{name} {is_} instead of {should}"
            for name, is_, should in zip(Totals._fields, found, expected, strict=True)
            if is_ != should
        )
        return ", ".join(parts)
    nodes: list[Compared] = []
    for node_id in ids:
        node = shadow.nodes.get(node_id)
        if node is None:
            return f"node {node_id} is missing"
        nodes.append(
            (
                node.id,
                0 if node.parent is None else node.parent.id,
                node.tokens,
                node.locks,
                node.hits,
                node.last_used,
                node.created,
                len(node.children),
            )
        )
    return None if digest_nodes(nodes) == digest else f"one of {len(nodes)} nodes differs"
