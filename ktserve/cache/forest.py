"""The radix forest: for each namespace a tree of token prefixes and the pages that hold them.

Keys are packed token ids (`ktserve.tokens`) in whole pages, compared as memory: a walk keeps an
offset into the request's one immutable buffer and makes one comparison a node. Trees never share a
node, and nothing here knows the page pool: pages come in with `extend` and go out with `evict`,
`flush` and as the duplicates that `extend` reports.

Eviction takes the least recently used page that no lease covers and on which no other page builds:
the tail of the oldest free leaf. The order is a heap that is kept from call to call. An entry may
be out of date, since a use only ever makes a node younger; it is put right when it comes to the
top. So a use costs nothing, and a victim O(log leaves).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from ktserve.cache.pool import PageIds
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import TOKEN_BYTES

_NO_PAGES: PageIds = np.empty(0, dtype=np.int64)


class Node:
    """One edge of a tree and the point it leads to.

    Attributes:
        key: the edge's tokens, whole pages of them; empty at a root.
        pages: where their keys and values are, one id a page.
        children: by the first page of their keys.
        locks: leases at this node or below it.
        last_used: the tick of the last lease that reached it; never older than a child's.
        queued: it has an entry in the eviction order.
        gone: it was evicted or flushed.
    """

    __slots__ = (
        "children",
        "gone",
        "key",
        "last_used",
        "locks",
        "pages",
        "parent",
        "queued",
        "tree",
    )

    def __init__(
        self, tree: Tree, key: bytes, pages: PageIds, parent: Node | None, last_used: int
    ) -> None:
        self.tree = tree
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_used = last_used
        self.queued = False
        self.gone = False


class Tree:
    """The prefixes of one namespace.

    Attributes:
        resident: pages in the tree.
        locked: those of them that a lease covers.
        leases: leases on the tree, those that cover nothing among them.
    """

    __slots__ = ("leases", "locked", "namespace", "resident", "root")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.root = Node(self, b"", _NO_PAGES, None, 0)
        self.resident = 0
        self.locked = 0
        self.leases = 0

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first; changes nothing."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Lease:
    """A right to read the pages of a prefix: while it is held, none of them can be evicted.

    Attributes:
        node: where the prefix ends.
        length: pages that it covers.
        held: it was not released yet.
    """

    __slots__ = ("held", "length", "node")

    def __init__(self, node: Node, length: int) -> None:
        self.node = node
        self.length = length
        self.held = True


class RadixForest:
    """All trees, and the order in which their pages are given up.

    Attributes:
        page_size: tokens a page.
        resident: pages in all trees.
        locked: those of them that leases cover; the others can be evicted.
        evicted: pages evicted so far.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be at least 1 token")
        self.page_size = page_size
        self.resident = 0
        self.locked = 0
        self.evicted = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._trees: dict[Namespace, Tree] = {}
        self._order: list[tuple[int, int, Node]] = []
        self._ticks = 0
        self._pushes = 0

    @property
    def evictable(self) -> int:
        """Pages that `evict` could return now."""
        return self.resident - self.locked

    def trees(self) -> Iterator[Tree]:
        """Every tree that holds a page or a lease."""
        return iter(self._trees.values())

    def peek(self, namespace: Namespace, tokens: bytes, max_pages: int) -> tuple[int, int]:
        """How much of ``tokens`` is cached, and how much of that no lease covers yet.

        Changes nothing, neither a node nor an age.

        Returns:
            pages, at most ``max_pages``; and those of them that a lease would newly lock. The
            second counts whole nodes: at most one partly matched node makes it too high.
        """
        tree = self._trees.get(namespace)
        if tree is None:
            return 0, 0
        node, at, child, partial = self._walk(tree.root, 0, tokens, max_pages)
        free = len(child.pages) if child is not None and child.locks == 0 else 0
        above: Node | None = node
        # Locks only grow towards the root, so the unlocked part of a path is its lower end.
        while above is not None and above.locks == 0:
            free += len(above.pages)
            above = above.parent
        return at // self._page_bytes + partial, free

    def match(
        self, namespace: Namespace, tokens: bytes, max_pages: int
    ) -> tuple[Lease, list[PageIds]]:
        """Lease the longest cached prefix of ``tokens``, at most ``max_pages`` long.

        Returns:
            the lease, and its pages in order, as the arrays of its nodes; they are the forest's
            own, to be read and not kept.
        """
        tree = self._trees.get(namespace)
        if tree is None:
            tree = self._trees[namespace] = Tree(namespace)
        node, at, child, partial = self._walk(tree.root, 0, tokens, max_pages)
        if child is not None:
            node = self._split(child, partial)
        lease = Lease(node, at // self._page_bytes + partial)
        tree.leases += 1
        pages: list[PageIds] = []
        self._lock(node, pages)
        pages.reverse()
        return lease, pages

    def extend(self, lease: Lease, tokens: bytes, pages: PageIds) -> list[tuple[int, PageIds]]:
        """Add what follows the leased prefix; the lease then covers all of it.

        Where the tree has the same tokens already, its own pages stay and the caller's are not
        taken.

        Args:
            lease: a held lease.
            tokens: the whole sequence from its first token, whole pages; it starts with the leased
                prefix.
            pages: the page of each, from the first.

        Returns:
            what was there already, as (position in pages, the forest's pages from there on): the
            caller keeps its own pages at those positions, to give them back, and must read the
            forest's from now on. All other pages beyond the lease belong to the forest.
        """
        start = lease.node
        end = len(tokens) // self._page_bytes
        node, at, child, partial = self._walk(start, lease.length * self._page_bytes, tokens, end)
        if child is not None:
            node = self._split(child, partial)
        matched = at // self._page_bytes + partial
        present: list[tuple[int, PageIds]] = []
        position, above = matched, node
        while above is not start:
            assert above.parent is not None
            position -= len(above.pages)
            present.append((position, above.pages.copy()))
            above = above.parent
        present.reverse()
        if matched < end:
            node = self._grow(node, start, tokens[matched * self._page_bytes :], pages[matched:end])
        # Lock the new end before letting go of the old: a page between them is never free.
        self._lock(node, None)
        self._unlock(start)
        lease.node = node
        lease.length = end
        return present

    def release(self, lease: Lease) -> None:
        """Give the lease up. A second call does nothing.

        The prefix was in use until now, so its age counts from here.
        """
        if not lease.held:
            return
        lease.held = False
        node = lease.node
        tree = node.tree
        tree.leases -= 1
        self._ticks += 1
        step: Node | None = node
        while step is not None:
            step.last_used = self._ticks
            step = step.parent
        self._unlock(node)
        self._drop_if_empty(tree)

    def evict(self, count: int) -> PageIds:
        """Give up the ``count`` least recently used pages that no lease covers, or all such.

        Returns:
            the pages, which belong to the caller now.
        """
        victims: list[PageIds] = []
        missing = count
        while missing > 0 and self._order:
            tick, _, node = self._order[0]
            if node.gone or node.locks or node.children:
                heapq.heappop(self._order)
                node.queued = False  # queued again when it becomes a free leaf again
                continue
            if tick != node.last_used:
                self._pushes += 1
                heapq.heapreplace(self._order, (node.last_used, self._pushes, node))
                continue
            kept = max(0, len(node.pages) - missing)
            victims.append(node.pages[kept:].copy())
            missing -= len(node.pages) - kept
            if kept:
                node.key = node.key[: kept * self._page_bytes]
                node.pages = node.pages[:kept].copy()
                self._count(node.tree, -len(victims[-1]))
            else:
                heapq.heappop(self._order)
                self._remove(node)
        taken = np.concatenate(victims) if victims else _NO_PAGES
        self.evicted += len(taken)
        return taken

    def flush(self, namespace: Namespace | None = None) -> PageIds:
        """Give up every page that no lease covers, of one namespace or (None) of all.

        Returns:
            the pages, which belong to the caller now.
        """
        trees = list(self._trees.values())
        if namespace is not None:
            trees = [tree for tree in trees if tree.namespace == namespace]
        victims: list[PageIds] = []
        for tree in trees:
            for node in reversed(list(tree.nodes())):  # children before parents
                if node.locks == 0:
                    victims.append(node.pages)
                    self._remove(node)
        self._order = [entry for entry in self._order if not entry[2].gone]
        heapq.heapify(self._order)
        return np.concatenate(victims) if victims else _NO_PAGES

    # The walk and the four changes of shape.

    def _walk(
        self, node: Node, at: int, tokens: bytes, max_pages: int
    ) -> tuple[Node, int, Node | None, int]:
        """Follow ``tokens`` from byte ``at`` below ``node``, to page ``max_pages`` at most.

        Returns:
            the last node matched whole; the byte where it ends; the child matched in part, if any;
            how many of its pages.
        """
        page_bytes = self._page_bytes
        limit = min(len(tokens) // page_bytes, max_pages) * page_bytes
        while at < limit:
            child = node.children.get(tokens[at : at + page_bytes])
            if child is None:
                break
            key = child.key
            end = at + len(key)
            if end > limit or not tokens.startswith(key, at):
                common = common_prefix(tokens, at, key, 0, min(limit - at, len(key)))
                return node, at, child, common // page_bytes
            node, at = child, end
        return node, at, None, 0

    def _split(self, node: Node, pages: int) -> Node:
        """Cut ``node`` after ``pages`` pages; returns the new upper part.

        The lower part keeps its identity, since leases and the eviction order refer to ends.
        """
        parent = node.parent
        assert parent is not None
        cut = pages * self._page_bytes
        upper = Node(node.tree, node.key[:cut], node.pages[:pages].copy(), parent, node.last_used)
        upper.locks = node.locks
        lower_key, lower_pages = node.key[cut:], node.pages[pages:].copy()
        upper.children[lower_key[: self._page_bytes]] = node
        parent.children[upper.key[: self._page_bytes]] = upper
        node.key, node.pages, node.parent = lower_key, lower_pages, upper
        return upper

    def _grow(self, node: Node, start: Node, key: bytes, pages: PageIds) -> Node:
        """Put new tokens below ``node``; returns where they end.

        A growing conversation lengthens its own leaf. That is right only while the leaf's end is
        nobody else's: no child, and no lease but the one at ``start`` that is being extended.
        """
        own = 1 if node is start else 0
        if node.parent is not None and not node.children and node.locks == own:
            node.key += key
            node.pages = np.concatenate((node.pages, pages))
            if node.locks:
                self._count_locked(node.tree, len(pages))
        else:
            child = Node(node.tree, key, pages.copy(), node, self._ticks)
            node.children[key[: self._page_bytes]] = child
            node = child
        self._count(node.tree, len(pages))
        return node

    def _remove(self, node: Node) -> None:
        """Take a free leaf out of its tree."""
        tree = node.tree
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self._page_bytes]]
        node.gone = True
        self._count(tree, -len(node.pages))
        self._queue_if_free(parent)
        self._drop_if_empty(tree)

    # Locks, counts and the eviction order.

    def _lock(self, node: Node, pages: list[PageIds] | None) -> None:
        """Lock and touch the path from ``node`` to the root; collect its pages, bottom first."""
        self._ticks += 1
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                self._count_locked(step.tree, len(step.pages))
            step.locks += 1
            step.last_used = self._ticks
            if pages is not None:
                pages.append(step.pages)
            step = step.parent

    def _unlock(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            if step.locks == 0:
                self._count_locked(step.tree, -len(step.pages))
            step = step.parent
        self._queue_if_free(node)

    def _queue_if_free(self, node: Node) -> None:
        if node.locks or node.children or node.parent is None or node.queued:
            return
        node.queued = True
        self._pushes += 1
        heapq.heappush(self._order, (node.last_used, self._pushes, node))

    def _count(self, tree: Tree, pages: int) -> None:
        tree.resident += pages
        self.resident += pages

    def _count_locked(self, tree: Tree, pages: int) -> None:
        tree.locked += pages
        self.locked += pages

    def _drop_if_empty(self, tree: Tree) -> None:
        if not tree.leases and not tree.root.children:
            self._trees.pop(tree.namespace, None)


def common_prefix(
    left: bytes | bytearray, left_at: int, right: bytes, right_at: int, limit: int
) -> int:
    """Equal bytes from the two places on, whole tokens, at most ``limit`` (whole tokens too)."""
    count = limit // TOKEN_BYTES
    a = np.frombuffer(left, dtype="<i4", count=count, offset=left_at)
    b = np.frombuffer(right, dtype="<i4", count=count, offset=right_at)
    differ = a != b
    first = int(differ.argmax()) if count else 0
    return first * TOKEN_BYTES if count and differ[first] else limit
