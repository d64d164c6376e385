"""The whole invariant of the cache, recounted from scratch: for tests and investigations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from ktserve.cache.manager import BlockTable, CacheManager
from ktserve.tokens import TOKEN_BYTES


class InvariantBroken(AssertionError):
    """The cache's books are wrong; the message says which."""


def audit(cache: CacheManager, tables: Iterable[BlockTable]) -> None:
    """Recount everything.

    Args:
        cache: the cache.
        tables: every open block table.

    Raises:
        InvariantBroken: a page has no owner or two, a counter differs from a recount, locks differ
            from leases, a child is younger than its parent, or a free leaf is missing from the
            eviction order.
    """
    tables = list(tables)
    forest, pool = cache.forest, cache.pool
    owners: Counter[int] = Counter(pool.free_ids().tolist())
    leased: Counter[int] = Counter()
    for table in tables:
        _expect(table.lease.held, "an open table holds a lease")
        owners.update(table.pages[table.lease.length : table.length].tolist())
        node = table.lease.node
        depth = 0
        step = node
        while step.parent is not None:
            leased[id(step)] += 1
            depth += len(step.pages)
            step = step.parent
        _expect(depth == table.lease.length, "a lease ends at a node's end")
        _expect(step.tree.namespace == table.namespace, "a lease is on its own namespace's tree")
        path = _path_pages(table)
        _expect(bool((table.pages[: len(path)] == path).all()), "a table reads its lease's pages")
    resident = locked = 0
    for tree in list(forest.trees()):
        in_tree = 0
        held = 0
        for node in tree.nodes():
            _expect(node.tree is tree and not node.gone, "a node is of its tree")
            _expect(node.parent is not None, "only a root has no parent")
            assert node.parent is not None
            _expect(len(node.pages) > 0, "a node holds a page")
            _expect(
                len(node.key) == len(node.pages) * forest.page_size * TOKEN_BYTES,
                "a node has one page id for each page of its key",
            )
            first_page = node.key[: forest.page_size * TOKEN_BYTES]
            _expect(node.parent.children[first_page] is node, "a node is found by its first page")
            _expect(node.parent.last_used >= node.last_used, "no child is younger than its parent")
            _expect(node.locks == leased[id(node)], "locks are the leases at and below a node")
            free_leaf = not node.locks and not node.children
            _expect(node.queued or not free_leaf, "a free leaf is in the eviction order")
            owners.update(node.pages.tolist())
            in_tree += len(node.pages)
            held += len(node.pages) if node.locks else 0
        _expect(tree.resident == in_tree, "a tree counts its pages")
        _expect(tree.locked == held, "a tree counts its locked pages")
        _expect(tree.leases > 0 or in_tree > 0, "an empty tree is dropped")
        resident += in_tree
        locked += held
    _expect(forest.resident == resident, "the forest counts its pages")
    _expect(forest.locked == locked, "the forest counts its locked pages")
    leases = Counter(table.namespace for table in tables)
    for tree in forest.trees():
        _expect(tree.leases == leases[tree.namespace], "a tree counts its leases")
    private: Counter[str] = Counter()
    for table in tables:
        private[table.namespace.tenant] += table.private
    _expect(+private == +cache.private, "private pages are counted by tenant")
    _expect(all(count == 1 for count in owners.values()), "a page has one owner")
    _expect(set(owners) == set(range(pool.total)), "every page has an owner")
    _expect(cache.balanced(), "the running check agrees")


def _path_pages(table: BlockTable) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    parts = []
    step = table.lease.node
    while step.parent is not None:
        parts.append(step.pages)
        step = step.parent
    return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int64)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantBroken(f"broken: {what}")
