"""Looking at the live forest: its nodes and its next victims, for operators.

Nothing here changes anything: no age, no order, no edge. What it returns is true until the next
operation on the forest.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Literal, NamedTuple

from ktserve.cache.accounts import Account, Accounts
from ktserve.cache.forest import Behind, RadixForest
from ktserve.cache.kept import PublicPrefix
from ktserve.cache.node import Node, Tree
from ktserve.tenancy.namespace import Namespace

Order = Literal["size", "last_used", "created", "hits", "priority", "locks", "children", "id"]

_ORDERS: dict[Order, Callable[[Node], int]] = {
    "size": lambda node: node.size,
    "last_used": lambda node: node.last_used,
    "created": lambda node: node.created,
    "hits": lambda node: node.hits,
    "priority": lambda node: node.priority,
    "locks": lambda node: node.locks,
    "children": lambda node: len(node.children),
    "id": lambda node: node.id,
}


class Cursor(NamedTuple):
    """The last node of a page: what it was ordered by, and its id. It may be gone by now."""

    value: int
    node: int


class Page(NamedTuple):
    """Some children of a node.

    Attributes:
        after: where the next page begins; None at the end.
    """

    nodes: list[Node]
    after: Cursor | None


class Victim(NamedTuple):
    """What goes next.

    Attributes:
        pages: so many of the node's last ones.
    """

    node: Node
    pages: int


# Nodes.


def find(forest: RadixForest, node_id: int) -> Node | None:
    """The node with that id, a root or another; looks at each there is."""
    for tree in forest.trees():
        for root in tree.roots():
            if root.id == node_id:
                return root
        for node in tree.walk():
            if node.id == node_id:
                return node
    return None


def path(node: Node) -> list[Node]:
    """From ``node`` to its root, both included."""
    steps: list[Node] = []
    step: Node | None = node
    while step is not None:
        steps.append(step)
        step = step.parent
    return steps


def children(
    node: Node,
    order: Order,
    count: int,
    *,
    descending: bool = False,
    after: Cursor | None = None,
) -> Page:
    """Up to ``count`` children, in ``order`` and where that is equal by id.

    The next page begins behind the cursor's value, whether its node is still there or not. So a
    child whose value changes between two pages may be seen twice or never; all others are seen
    once.

    Raises:
        ValueError: ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"a page of {count} nodes; the least is 1")
    value = _ORDERS[order]
    sign = -1 if descending else 1
    start = None if after is None else (sign * after.value, after.node)
    places = ((sign * value(child), child.id, child) for child in node.children.values())
    rest = places if start is None else (one for one in places if one[:2] > start)
    found = heapq.nsmallest(count + 1, rest)
    nodes = [child for _, _, child in found[:count]]
    more = len(found) > count
    return Page(nodes, Cursor(value(nodes[-1]), nodes[-1].id) if more else None)


# The next victims.


def victims(accounts: Accounts, account: Account) -> Iterator[Node]:
    """The nodes of one tenant that no lease covers, in the order in which they would go.

    To be used up before the next operation on the forest.
    """
    key = accounts.key
    leaves = account.victims.ordered()
    leaf = next(leaves, None)
    # Nodes that come to be leaves on the way.
    others: list[tuple[int, int, Node]] = []
    left: dict[int, int] = {}
    while leaf is not None or others:
        if leaf is not None and (not others or key(leaf) < others[0][0]):
            node, leaf = leaf, next(leaves, None)
        else:
            node = heapq.heappop(others)[2]
        yield node
        above = node.parent
        if above is None or above.parent is None:
            continue
        left[above.id] = left.get(above.id, len(above.children)) - 1
        if not left[above.id] and not above.locks:
            heapq.heappush(others, (key(above), above.id, above))


def evictions(
    accounts: Accounts, taker: Account, pages: int, *, tick: int, own: int = 0
) -> Iterator[Victim]:
    """What `RadixForest.evict` would give up for a request of ``taker``, step by step.

    Args:
        tick: now, for ages.
        own: how many of the pages must come from ``taker`` itself, because of its cap.
    """
    queues: dict[str, Iterator[Node]] = {}
    heads: dict[str, Victim | None] = {}
    taken: Counter[str] = Counter()

    def head(account: Account) -> Victim | None:
        name = account.tenant
        if name not in queues:
            queues[name] = victims(accounts, account)
            heads[name] = _next(queues[name])
        return heads[name]

    while pages > 0:
        if own > 0:
            giver, most = taker, min(own, taker.evictable - taken[taker.tenant])
        else:
            giver, most = _giver(accounts, taker, tick, head, taken)
        first = head(giver) if most > 0 else None
        if first is None:
            return
        count = min(pages, most, first.pages)
        yield Victim(first.node, count)
        rest = first.pages - count
        name = giver.tenant
        heads[name] = Victim(first.node, rest) if rest else _next(queues[name])
        taken[name] += count
        pages -= count
        own -= count


def _next(queue: Iterator[Node]) -> Victim | None:
    node = next(queue, None)
    return None if node is None else Victim(node, node.size)


def _giver(
    accounts: Accounts,
    taker: Account,
    tick: int,
    head: Callable[[Account], Victim | None],
    taken: Counter[str],
) -> tuple[Account, int]:
    """What `Accounts.offers` says next, where some pages were taken already."""
    chosen, best, most = taker, 0.0, taker.evictable - taken[taker.tenant]
    found = False
    for account in accounts:
        spare = account.spare - taken[account.tenant]
        first = head(account) if spare > 0 else None
        if first is None:
            continue
        rank = accounts.rank(account, first.node, tick)
        if not found or rank > best:
            found, chosen, best, most = True, account, rank, spare
    return chosen, most


# For the operator alone.


def elsewhere(
    forest: RadixForest,
    namespace: Namespace,
    tokens: bytes,
    max_pages: int,
    most: int,
    public: Collection[PublicPrefix] = (),
) -> list[tuple[Tree, int]]:
    """Which other namespaces hold more of a prompt than its own finds. Never for a tenant's eyes.

    Those of another adapter do not count: it computes other keys and values.

    Args:
        tokens: the prompt.
        max_pages: of it that count.
        most: trees to return.
        public: the registered prefixes: what of them it may read it finds, and others may hold
            more behind them.

    Returns:
        trees and up to where each holds the prompt, in pages, the furthest first.
    """
    begins = [one for one in public if one.pages <= max_pages and tokens.startswith(one.tokens)]

    def held(tree: Tree) -> int:
        where = tree.namespace
        furthest = forest.peek(where, tokens, max_pages)[0]
        for one in begins:
            if one.id in tree.grafts:
                end = forest.peek(where, tokens, max_pages, Behind(one.id, one.pages))[0]
                # The prefix itself is in the public tree.
                furthest = max(furthest, end if end > one.pages else 0)
        return furthest

    own = forest.tree(namespace)
    known = 0 if own is None else held(own)
    for one in begins:
        readable = namespace.tenant in one.readers and namespace.adapter is None
        if readable and one.lease is not None:
            known = max(known, one.pages)
    found = [
        (tree, pages)
        for tree in forest.trees()
        if tree is not own
        and tree.namespace.adapter == namespace.adapter
        and (pages := held(tree)) > known
    ]
    return heapq.nsmallest(most, found, key=lambda one: (-one[1], one[0].index))
