"""The books of the cache, written anew after an error in the middle of an operation.

What is believed: the shape of the trees, which changes in single statements, the open tables, and
the leases that somebody holds. All counts, locks, orders and the free list follow from these. A
page that is in a tree is the tree's; one behind a table's lease is the table's; any other is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ktserve.cache.node import Node, Tree, path_pages
from ktserve.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from ktserve.cache.manager import CacheManager
    from ktserve.cache.pool import PageIds
    from ktserve.cache.tables import BlockTable


def repair(cache: CacheManager) -> None:
    """Bring pool, forest, accounts and tables of ``cache`` into agreement."""
    forest, accounts = cache.forest, cache.accounts
    page_bytes = cache.page_size * TOKEN_BYTES
    trees = list(forest.trees())
    for tree in trees:
        for root in tree.roots():
            root.locks = 0
        for node in tree.walk():
            # Where a change of length was cut off, the key is longer than the pages.
            node.key = node.key[: node.size * page_bytes]
            node.locks = 0
        tree.leases = 0
        _order(tree)
    for lease in cache.leases():
        lease.node.tree.leases += 1
        depth = 0
        step: Node | None = lease.node
        while step is not None:
            step.locks += 1
            depth += step.size
            step = step.parent
        lease.length = depth
    held = []
    for table in cache.tables:
        table.lease.length += 0 if table.base is None else table.base.length
        table.length = max(table.length, table.lease.length)
        table.pages[: table.lease.length] = _leased(table)
        held.append(table.pages[table.lease.length : table.length])
    for account in accounts:
        account.trees.clear()
    for tree in trees:
        _recount(tree)
        tree.account.trees[tree.namespace] = tree
        held += [np.frombuffer(node.pages, dtype=np.int64) for node in tree.walk()]
    forest.drop_empty()
    accounts.recount()
    for table in cache.tables:
        accounts.change(table.account, private=table.private)
    for account in accounts:
        own = list(account.trees.values())
        account.victims.reset(node for tree in own for node in tree.walk())
    forest.watch_expiry()
    cache.pool.keep(np.concatenate(held) if held else np.empty(0, dtype=np.int64))


def _order(tree: Tree) -> None:
    """Who reaches a node has reached those above it: no less used, nor less important."""
    for node in reversed(list(tree.walk())):  # children before parents
        parent = node.parent
        assert parent is not None
        parent.last_used = max(parent.last_used, node.last_used)
        parent.hits = max(parent.hits, node.hits)
        parent.priority = max(parent.priority, node.priority)
    tree.last_used = max(tree.last_used, *(root.last_used for root in tree.roots()))


def _recount(tree: Tree) -> None:
    tree.resident = tree.locked = tree.nodes = 0
    for node in tree.walk():
        tree.nodes += 1
        tree.resident += node.size
        tree.locked += node.size if node.locks else 0


def _leased(table: BlockTable) -> PageIds:
    """The page ids of everything that ``table`` leases."""
    packed = path_pages(table.lease.node)
    if table.base is not None:
        packed = path_pages(table.base.node) + packed
    return np.frombuffer(packed, dtype=np.int64)
