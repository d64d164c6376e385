"""The whole invariant of the cache, recounted from scratch: for tests and investigations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from ktserve.cache.manager import CacheManager
from ktserve.cache.node import Node, Tree, path_pages
from ktserve.cache.tables import BlockTable
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
    _expect(set(tables) == cache.tables, "the cache knows the open tables")
    owners: Counter[int] = Counter(cache.pool.free_ids().tolist())
    for table in tables:
        _audit_table(table)
        owners.update(table.pages[table.lease.length : table.length].tolist())
    locks, leases = _locks(cache)
    for tree in list(cache.forest.trees()):
        for node in tree.walk():
            owners.update(np.frombuffer(bytes(node.pages), dtype=np.int64).tolist())
        _audit_tree(tree, cache.page_size * TOKEN_BYTES, locks)
        _expect(tree.leases == leases[id(tree)], "a tree counts its leases")
        _expect(tree.leases > 0 or tree.resident > 0, "an empty tree is dropped")
    _audit_accounts(cache, tables)
    _expect(all(count == 1 for count in owners.values()), "a page has one owner")
    _expect(set(owners) == set(range(cache.pool.total)), "every page has an owner")
    _expect(cache.balanced(), "the running check agrees")


def _audit_table(table: BlockTable) -> None:
    _expect(table.lease.held, "an open table holds a lease")
    own, base = path_pages(table.lease.node), bytearray()
    _expect(table.lease.node.tree.namespace == table.namespace, "a lease is on its own tree")
    if table.base is not None:
        _expect(table.base.held, "an open table holds the lease of its public prefix")
        base = path_pages(table.base.node)
    path = np.frombuffer(bytes(base + own), dtype=np.int64)
    _expect(len(path) == table.lease.length, "a lease ends at a node's end")
    _expect(bool((table.pages[: len(path)] == path).all()), "a table reads its lease's pages")


def _locks(cache: CacheManager) -> tuple[Counter[int], Counter[int]]:
    """What nodes' locks and trees' leases should be, by the object's id."""
    locks: Counter[int] = Counter()
    leases: Counter[int] = Counter()
    for lease in cache.leases():
        leases[id(lease.node.tree)] += 1
        step: Node | None = lease.node
        while step is not None:
            locks[id(step)] += 1
            step = step.parent
    return locks, leases


def _audit_tree(tree: Tree, page_bytes: int, locks: Counter[int]) -> None:
    resident = locked = nodes = 0
    for root in tree.roots():
        _expect(root.parent is None and not root.key, "a root has no edge")
        _expect(root.locks == locks[id(root)], "a root's locks are the leases below it")
    for node in tree.walk():
        parent = node.parent
        _expect(node.tree is tree and not node.gone, "a node is of its tree")
        _expect(parent is not None, "only a root has no parent")
        assert parent is not None
        _expect(node.size > 0, "a node holds a page")
        _expect(len(node.key) == node.size * page_bytes, "a node has a page id for each page")
        first = bytes(node.key[:page_bytes])
        _expect(parent.children[first] is node, "a node is found by its first page")
        _expect(parent.last_used >= node.last_used, "no child is younger than its parent")
        _expect(parent.priority >= node.priority, "no child has a higher priority")
        _expect(node.locks == locks[id(node)], "locks are the leases at and below a node")
        free_leaf = not node.locks and not node.children
        _expect(node.queued or not free_leaf, "a free leaf is in the eviction order")
        resident += node.size
        locked += node.size if node.locks else 0
        nodes += 1
    _expect(tree.resident == resident, "a tree counts its pages")
    _expect(tree.locked == locked, "a tree counts its locked pages")
    _expect(tree.nodes == nodes, "a tree counts its nodes")


def _audit_accounts(cache: CacheManager, tables: list[BlockTable]) -> None:
    forest, accounts = cache.forest, cache.accounts
    private: Counter[str] = Counter()
    for table in tables:
        private[table.namespace.tenant] += table.private
    seen = 0
    for account in accounts:
        trees = [tree for tree in forest.trees() if tree.account is account]
        seen += len(trees)
        _expect(
            {id(tree) for tree in account.trees.values()} == {id(tree) for tree in trees},
            "an account knows its trees",
        )
        _expect(account.resident == sum(t.resident for t in trees), "an account counts its pages")
        _expect(account.locked == sum(t.locked for t in trees), "an account counts its locks")
        _expect(account.nodes == sum(t.nodes for t in trees), "an account counts its nodes")
        _expect(account.private == private[account.tenant], "private pages are counted by tenant")
        spare = max(0, min(account.evictable, account.held - account.share.floor))
        _expect(account.spare == spare, "spare is what is evictable above the floor")
        queued = [node for _, _, node in account.entries()]
        _expect(len(queued) == len({id(node) for node in queued}), "a node is queued once")
        gone = sum(node.gone for node in queued)
        _expect(account.stale == gone, "an account counts what is gone from its order")
    _expect(seen == sum(1 for _ in forest.trees()), "a tree has an account")
    for name in ("resident", "locked", "private", "spare"):
        total = sum(getattr(account, name) for account in accounts)
        _expect(getattr(accounts, name) == total, f"the accounts' {name} pages add up")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantBroken(f"broken: {what}")
