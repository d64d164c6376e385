"""The whole invariant of the cache, recounted from scratch: for tests and investigations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from ktserve.cache.accounts import Account
from ktserve.cache.expiry import SECOND
from ktserve.cache.manager import CacheManager
from ktserve.cache.node import PAGE_ID_BYTES, Lease, Node, Tree, path_pages
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
            from leases, a child was used after its parent, a free leaf is missing from the eviction
            order or out of place in it, or a namespace's time to live is not watched.
    """
    tables = list(tables)
    _expect(set(tables) == cache.tables, "the cache knows the open tables")
    owners: Counter[int] = Counter(cache.pool.free_ids().tolist())
    for table in tables:
        _audit_table(table)
        owners.update(table.pages[table.lease.length : table.length].tolist())
    for pin in cache.kept.pins.values():
        _audit_lease(pin.lease)
        _expect(pin.pages == pin.lease.length, "a pin knows its length")
    for lease in cache.leases():
        _expect(lease.held, "a lease that somebody holds was not released")
        tree = lease.node.tree
        _expect(cache.forest.tree(tree.namespace) is tree, "a leased tree is in the forest")
    locks, leases = _locks(cache)
    for tree in list(cache.forest.trees()):
        _expect(cache.forest.tree(tree.namespace) is tree, "a namespace has one tree")
        _expect(
            cache.accounts.of(tree.namespace.tenant) is tree.account,
            "a tree is on the account of its namespace's tenant",
        )
        for node in tree.walk():
            owners.update(np.frombuffer(node.pages, dtype=np.int64).tolist())
        _audit_tree(tree, cache.page_size * TOKEN_BYTES, locks)
        _expect(tree.leases == leases[id(tree)], "a tree counts its leases")
        _expect(tree.leases > 0 or tree.resident > 0, "an empty tree is dropped")
    _audit_accounts(cache, tables)
    _audit_history(cache)
    _audit_expiry(cache)
    _expect(all(count == 1 for count in owners.values()), "a page has one owner")
    _expect(set(owners) == set(range(cache.pool.total)), "every page has an owner")
    _expect(cache.balanced(), "the running check agrees")


def _audit_lease(lease: Lease) -> None:
    path = len(path_pages(lease.node)) // PAGE_ID_BYTES
    _expect(lease.length == path, "a lease ends at a node's end")


def _audit_table(table: BlockTable) -> None:
    own, base = path_pages(table.lease.node), b""
    _expect(table.lease.node.tree.namespace == table.namespace, "a lease is on its own tree")
    if table.base is not None:
        _audit_lease(table.base)
        base = path_pages(table.base.node)
    path = np.frombuffer(base + own, dtype=np.int64)
    _expect(len(path) == table.lease.length, "a lease ends at a node's end")
    _expect(table.length >= len(path), "a table holds what it leases")
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
        _expect(tree.last_used >= root.last_used, "a tree was used when one of its roots was")
    for node in tree.walk():
        parent = node.parent
        _expect(node.tree is tree and not node.gone, "a node is of its tree")
        _expect(parent is not None, "only a root has no parent")
        assert parent is not None
        _expect(node.size > 0, "a node holds a page")
        _expect(len(node.key) == node.size * page_bytes, "a node has a page id for each page")
        first = node.key[:page_bytes]
        _expect(parent.children[first] is node, "a node is found by its first page")
        _expect(parent.last_used >= node.last_used, "no child was used after its parent")
        _expect(parent.created <= node.created, "no child came before its parent")
        _expect(parent.hits >= node.hits, "no child was hit more often than its parent")
        _expect(parent.priority >= node.priority, "no child has a higher priority")
        _expect(node.locks == locks[id(node)], "locks are the leases at and below a node")
        free_leaf = not node.locks and not node.children
        _expect((node.queued is not None) == free_leaf, "a node knows that it may go next")
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
        queued = list(account.victims.ordered())
        free = {id(n) for tree in trees for n in tree.walk() if not n.locks and not n.children}
        _expect(len(queued) == len({id(node) for node in queued}), "a node is queued once")
        _expect({id(node) for node in queued} == free, "the eviction order has the free leaves")
        _expect(
            sorted(map(id, account.victims)) == sorted(map(id, queued)), "it is all of one piece"
        )
        numbers = [accounts.key(node) for node in queued]
        _expect(numbers == sorted(numbers), "the eviction order is the policy's")
        first = account.victims.first()
        _expect(
            first is None
            if not queued
            else first is not None and accounts.key(first) == numbers[0],
            "the first victim is the first by the policy",
        )
    _expect(seen == sum(1 for _ in forest.trees()), "a tree has an account")
    _expect(
        accounts.givers() == {account for account in accounts if account.spare},
        "who has spare pages may be asked for them",
    )
    for name in ("resident", "locked", "private", "spare"):
        total = sum(getattr(account, name) for account in accounts)
        _expect(getattr(accounts, name) == total, f"the accounts' {name} pages add up")


def _audit_history(cache: CacheManager) -> None:
    """Counters of what was. A repair may lose a count of the last operation, never add one."""
    accounts = cache.accounts
    exact = not cache.repairs
    for account in accounts:
        counters: list[Account | Tree] = [account, *account.trees.values()]
        for one in counters:
            _expect(0 <= one.hits <= one.lookups, "a lookup hits or not")
            _expect(0 <= one.hit_tokens <= one.prompt_tokens, "what was found was asked for")
        for name in ("lookups", "hits", "hit_tokens", "prompt_tokens", "evicted", "caused"):
            parts = sum(getattr(tree, name) for tree in account.trees.values())
            _expect(parts <= getattr(account, name), f"an account counts its trees' {name}")
        blamed = account.evicted_by.total()
        _expect(blamed <= account.evicted, "what was evicted was evicted for somebody, or a rule")
        _expect(blamed == account.evicted or not exact, "all that was evicted has a cause")
    caused = sum(account.caused for account in accounts)
    _expect(caused <= accounts.evicted, "tenants cause evictions for requests")
    _expect(caused == accounts.evicted or not exact, "each such eviction has a tenant")


def _audit_expiry(cache: CacheManager) -> None:
    """Each namespace with a time to live is looked at in time."""
    watched = cache.forest.expiries.watched()
    for tree in cache.forest.trees():
        ttl = tree.account.quota.cache_ttl
        if ttl is not None:
            due = watched.get(tree.index)
            _expect(due is not None, "a namespace's time to live is watched")
            _expect(
                due is not None and (tree.leases > 0 or due <= tree.last_used + int(ttl * SECOND)),
                "its time to live is looked at in time",
            )


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantBroken(f"broken: {what}")
