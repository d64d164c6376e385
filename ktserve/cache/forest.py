"""The radix forest: for each namespace a tree of token prefixes and the pages that hold them.

Keys are packed token ids (`ktserve.tokens`) in whole pages, compared as memory: a walk keeps an
offset into the request's one immutable buffer and makes one comparison a node. Trees never share a
node, and nothing here knows the page pool: pages come in with `extend` and go out with `evict`,
`flush` and as the duplicates that `extend` reports.

Pages leave from the tails of leaves that no lease covers. Who gives up, and which of its leaves,
`ktserve.cache.accounts` knows.

Every change of shape is one statement that either happens or does not. Counts, locks and orders
follow it and can be recounted from the shape and the leases (`ktserve.cache.repair`), so that an
exception at any point loses nothing.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ktserve.cache.accounts import Account, Accounts
from ktserve.cache.expiry import Expiries
from ktserve.cache.explain import explain
from ktserve.cache.node import (
    NO_CHILDREN,
    PAGE_ID_BYTES,
    Lease,
    Node,
    Place,
    Tree,
    path_length,
)
from ktserve.cache.reasons import Reason
from ktserve.cache.records import Kind, Records, Why
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import TOKEN_BYTES, common_prefix

EDGE_TOKENS = 8192
"""The longest edge. It bounds what a split copies; a longer prompt is a chain of nodes."""

# Plain numbers, since a member of an enumeration costs a lookup at each use.
_OPENED, _CLOSED, _GRAFTED = int(Kind.OPENED), int(Kind.CLOSED), int(Kind.GRAFTED)
_LEASED, _MOVED, _RELEASED = int(Kind.LEASED), int(Kind.MOVED), int(Kind.RELEASED)
_SPLIT, _INSERTED = int(Kind.SPLIT), int(Kind.INSERTED)
_LENGTHENED, _EVICTED = int(Kind.LENGTHENED), int(Kind.EVICTED)
_LOOKUP, _OWN, _OTHER = int(Why.LOOKUP), int(Why.OWN), int(Why.OTHER)


class Behind(NamedTuple):
    """A public prefix that a request's own tokens follow.

    Attributes:
        public: its id.
        pages: its length.
    """

    public: int
    pages: int


class RadixForest:
    """All trees.

    Args:
        page_size: tokens a page.
        accounts: what each tenant holds.
        records: where changes are told; None tells nobody.
        clock: nanoseconds that never go back.
    """

    def __init__(
        self,
        page_size: int,
        accounts: Accounts,
        *,
        records: Records | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be at least 1 token")
        self.page_size = page_size
        self.accounts = accounts
        self.expiries = Expiries()
        self._emit = None if records is None else records.emit
        self._clock = clock
        self._page_bytes = page_size * TOKEN_BYTES
        self._edge_bytes = max(1, EDGE_TOKENS // page_size) * self._page_bytes
        self._trees: dict[Namespace, Tree] = {}
        self._tick = 0
        self._last_node = 0
        self._last_tree = 0

    def trees(self) -> Iterator[Tree]:
        """Every tree that holds a page or a lease."""
        return iter(self._trees.values())

    def tree(self, namespace: Namespace) -> Tree | None:
        """The tree of ``namespace``, where there is one."""
        return self._trees.get(namespace)

    def now(self) -> int:
        """A tick that no operation had before."""
        tick = self._clock()
        if tick <= self._tick:
            tick = self._tick + 1
        self._tick = tick
        return tick

    @property
    def tick(self) -> int:
        """The newest operation's tick."""
        return self._tick

    # Reading.

    def peek(
        self, namespace: Namespace, tokens: bytes, max_pages: int, behind: Behind | None = None
    ) -> tuple[int, int]:
        """How much of ``tokens`` is cached, and how much of that no lease covers yet.

        Changes nothing, neither a node nor an age.

        Returns:
            pages, at most ``max_pages``, those of a public prefix among them; and those of the
            tree's own that a lease would newly lock.
        """
        tree = self._trees.get(namespace)
        root = None if tree is None else _root(tree, behind)
        begin = 0 if behind is None else behind.pages
        if root is None:
            return begin, 0
        node, at, child, common = self._walk(root, begin * self._page_bytes, tokens, max_pages)
        free = common // self._page_bytes if child is not None and child.locks == 0 else 0
        above: Node | None = node
        # Locks only grow towards the root, so the unlocked part of a path is its lower end.
        packed = 0
        while above is not None and above.locks == 0:
            packed += len(above.pages)
            above = above.parent
        return (at + common) // self._page_bytes, free + packed // PAGE_ID_BYTES

    # Leases.

    def match(
        self,
        namespace: Namespace,
        tokens: bytes,
        max_pages: int,
        *,
        request: int = 0,
        why: int = _LOOKUP,
        priority: int = 0,
        behind: Behind | None = None,
    ) -> tuple[Lease, list[bytes], Reason]:
        """Lease the longest cached prefix of ``tokens``, at most ``max_pages`` long.

        Args:
            request: for whom, for records.
            why: LOOKUP, RESUMED or PINNED.
            priority: the nodes of the prefix get it, where theirs is lower.
            behind: a public prefix with which ``tokens`` begin, and whose pages are leased apart.

        Returns:
            the lease; the pages of the tree's own part of it in order, packed, as its nodes hold
            them, to be read and not kept; and why it is not longer.
        """
        tick = self.now()
        tree = self._trees.get(namespace) or self._open(namespace, tick)
        root = _root(tree, behind) or self._graft(tree, behind, tick)
        begin = 0 if behind is None else behind.pages * self._page_bytes
        place = self._walk(root, begin, tokens, max_pages)
        reason = explain(place, begin, tokens, max_pages, self.page_size, tick)
        node, at, child, common = place
        if child is not None:
            node = self._split(child, common // self._page_bytes, tick)
        lease = Lease(node, (at + common) // self._page_bytes, request)
        pages: list[bytes] = []
        tree.leases += 1
        self._lock(node, tick, pages, hit=why == _LOOKUP)
        if priority:
            _raise_priority(node, priority)
        pages.reverse()
        if self._emit is not None:
            self._emit(
                _LEASED, node.id, 0, tree.index, lease.length * self.page_size, why, request, tick
            )
        return lease, pages, reason

    def share(self, node: Node, length: int, *, request: int, why: int) -> Lease:
        """A lease on the prefix of ``length`` pages that ends at ``node``, which is leased."""
        tick = self.now()
        lease = Lease(node, length, request)
        tree = node.tree
        tree.leases += 1
        self._lock(node, tick, None, hit=why == _LOOKUP)
        if self._emit is not None:
            size = length * self.page_size
            self._emit(_LEASED, node.id, 0, tree.index, size, why, request, tick)
        return lease

    def extend(
        self, lease: Lease, tokens: bytes, pages: bytes, priority: int = 0
    ) -> list[tuple[int, bytes]]:
        """Add what follows the leased prefix; the lease then covers all of it.

        Where the tree has the same tokens already, its own pages stay and the caller's are not
        taken.

        Args:
            lease: a held lease.
            tokens: the whole sequence from its first token, whole pages; it starts with the leased
                prefix.
            pages: those that follow the leased prefix, packed.
            priority: of the request.

        Returns:
            what was there already, as (position in pages, the forest's pages from there on): the
            caller keeps its own pages at those positions, to give them back, and must read the
            forest's from now on. All other pages beyond the lease belong to the forest.
        """
        tick = self.now()
        start, length = lease.node, lease.length
        tree = start.tree
        end = len(tokens) // self._page_bytes
        node, at, child, common = self._walk(start, length * self._page_bytes, tokens, end)
        if child is not None:
            node = self._split(child, common // self._page_bytes, tick)
            at += node.size * self._page_bytes
        matched = at // self._page_bytes
        present: list[tuple[int, bytes]] = []
        position, above = matched, node
        while above is not start:
            assert above.parent is not None
            position -= above.size
            present.append((position, above.pages))
            above = above.parent
        present.reverse()
        if matched < end:
            new = pages[(matched - length) * PAGE_ID_BYTES :]
            node = self._grow(lease, node, tokens, at, new, tick)
        else:
            lease.node, lease.length = node, end
        # Lock the new end before letting go of the old: a page between them is never free.
        self._lock(node, tick, None, hit=False)
        self._unlock(start)
        if priority:
            _raise_priority(node, priority)
        if self._emit is not None:
            self._emit(_MOVED, node.id, start.id, tree.index, 0, 0, lease.request, tick)
        return present

    def release(self, lease: Lease) -> None:
        """Give the lease up. A second call does nothing.

        The prefix was in use until now, so its age counts from here.
        """
        if not lease.held:
            return
        lease.held = False
        tick = self.now()
        node = lease.node
        tree = node.tree
        tree.leases -= 1
        tree.last_used = tick
        step: Node | None = node
        while step is not None:
            step.last_used = tick
            step = step.parent
        self._unlock(node)
        if self._emit is not None:
            self._emit(_RELEASED, node.id, 0, tree.index, 0, 0, lease.request, tick)
        self._drop_if_empty(tree, tick)

    # Giving up pages. What is returned belongs to the caller.

    def evict(
        self, count: int, taker: Account, *, own: int = 0, lease: Lease | None = None
    ) -> bytes:
        """Give up ``count`` pages for a request of ``taker``, or all that no lease or floor covers.

        Args:
            own: how many of them must come from ``taker`` itself, because of its cap.
            lease: the request's, whose namespace is the cause.

        Returns:
            page ids, packed.
        """
        tick = self.now()
        offers = self.accounts.offers(taker, tick)
        victims: list[bytes] = []
        missing = count
        while missing > 0:
            if own > 0:
                giver, most = taker, min(own, taker.evictable)
            else:
                chosen = next(offers, None)
                if chosen is None:
                    break
                giver, most = chosen
            node = giver.victims.first() if most > 0 else None
            if node is None:
                break
            take = min(missing, most, node.size)
            why = _OWN if giver is taker else _OTHER
            taken = self._take_tail(node, take, why, tick, 0 if lease is None else lease.request)
            pages = len(taken) // PAGE_ID_BYTES
            victims.append(taken)
            giver.evicted_by[taker.tenant] += pages
            missing -= pages
            own -= pages
        given = count - missing
        self.accounts.evicted += given
        taker.caused += given
        if lease is not None:
            lease.node.tree.caused += given
        return b"".join(victims)

    def shrink(self, account: Account, why: int, *, pages: int = 0, nodes: int = 0) -> bytes:
        """Give up at least so many pages and nodes of ``account``, by its policy; page ids."""
        tick = self.now()
        victims: list[bytes] = []
        while pages > 0 or nodes > 0:
            node = account.victims.first()
            if node is None:
                break
            # Nodes go whole: what is too much of them are not the pages.
            take = node.size if nodes > 0 else min(node.size, pages)
            nodes -= take == node.size
            pages -= take
            victims.append(self._take_tail(node, take, why, tick))
            account.evicted_by[""] += take
        return b"".join(victims)

    def flush(self, trees: Iterable[Tree], why: int) -> bytes:
        """Give up every page of ``trees`` that no lease covers; page ids."""
        tick = self.now()
        victims: list[bytes] = []
        for tree in list(trees):
            for node in reversed(list(tree.walk())):  # children before parents
                if node.locks == 0:
                    size = node.size
                    victims.append(self._take_tail(node, size, why, tick))
                    tree.account.evicted_by[""] += size
            self._drop_if_empty(tree, tick)
        return b"".join(victims)

    def emptiest(self, account: Account, count: int) -> list[Tree]:
        """Up to ``count`` unused namespaces of ``account``, the emptiest and then oldest first."""
        idle = [tree for tree in account.trees.values() if not tree.leases]
        return heapq.nsmallest(count, idle, key=lambda tree: (tree.resident, tree.last_used))

    def drop_empty(self) -> None:
        """Drop every tree without a page or a lease."""
        tick = self.now()
        for tree in list(self._trees.values()):
            self._drop_if_empty(tree, tick)

    # Times to live.

    def watch_expiry(self) -> None:
        """Look at every tree's time to live anew: quotas or trees have changed."""
        self.expiries.watch_all(self._trees.values())

    def expired(self) -> list[Tree]:
        """The namespaces that lay unused for longer than their tenant's ``cache_ttl``."""
        return self.expiries.expired(max(self._clock(), self._tick))

    @property
    def next_expiry(self) -> int | None:
        """Nanoseconds until `expired` can have something to say; None: it never will."""
        first = self.expiries.first
        return None if first is None else max(0, first - self._clock())

    # The walk and the changes of shape.

    def _walk(self, node: Node, at: int, tokens: bytes, max_pages: int) -> Place:
        """Follow ``tokens`` from byte ``at`` below ``node``, to page ``max_pages`` at most."""
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
                return Place(node, at, child, common)
            node, at = child, end
        return Place(node, at, None, 0)

    def _split(self, node: Node, pages: int, tick: int) -> Node:
        """Cut ``node`` after ``pages`` pages; returns the new upper part.

        The lower part keeps its identity, since leases and the eviction order refer to ends.
        """
        parent, tree, key, ids = node.parent, node.tree, node.key, node.pages
        assert parent is not None
        byte, id_byte = pages * self._page_bytes, pages * PAGE_ID_BYTES
        self._last_node += 1
        upper = Node(tree, self._last_node, key[:byte], ids[:id_byte], parent, node.created)
        upper.last_used, upper.hits, upper.priority = node.last_used, node.hits, node.priority
        upper.locks = node.locks
        lower, lower_ids = key[byte:], ids[id_byte:]
        upper.children = {lower[: self._page_bytes]: node}
        first = key[: self._page_bytes]
        place = parent.mutable_children()
        node.key, node.pages, node.parent, place[first] = lower, lower_ids, upper, upper
        tree.nodes += 1
        tree.account.nodes += 1
        if self._emit is not None:
            size = pages * self.page_size
            self._emit(_SPLIT, upper.id, node.id, tree.index, size, 0, 0, tick)
        return upper

    def _grow(
        self, lease: Lease, node: Node, tokens: bytes, at: int, pages: bytes, tick: int
    ) -> Node:
        """Put ``tokens`` from byte ``at`` on below ``node`` and move the lease's end there.

        A growing conversation lengthens its own leaf, as far as an edge may go. That is right only
        while the leaf's end is nobody else's: no child, and no lease but the one that is extended.

        Returns:
            the node where they end.
        """
        own = 1 if node is lease.node else 0
        room = (self._edge_bytes - len(node.key)) // self._page_bytes * PAGE_ID_BYTES
        if node.parent is not None and not node.children and node.locks == own and room > 0:
            self._lengthen(lease, node, tokens, at, pages[:room], tick)
            pages = pages[room:]
            at = lease.length * self._page_bytes
        return self._append(lease, node, tokens, at, pages, tick) if pages else node

    def _lengthen(
        self, lease: Lease, node: Node, tokens: bytes, at: int, pages: bytes, tick: int
    ) -> None:
        tree = node.tree
        count = len(pages) // PAGE_ID_BYTES
        end = at + count * self._page_bytes
        # The pages last: until they are there, a repair cuts the key and the lease.
        node.key += tokens[at:end]
        lease.node, lease.length = node, end // self._page_bytes
        node.pages += pages
        locked = count if node.locks else 0
        tree.resident += count
        tree.locked += locked
        self.accounts.change(tree.account, count, locked)
        if self._emit is not None:
            size = count * self.page_size
            self._emit(_LENGTHENED, node.id, 0, tree.index, size, 0, lease.request, tick)

    def _append(
        self, lease: Lease, node: Node, tokens: bytes, at: int, pages: bytes, tick: int
    ) -> Node:
        """New nodes below ``node``, one below the other where an edge would be too long."""
        tree = node.tree
        count = len(pages) // PAGE_ID_BYTES
        step = self._edge_bytes // self._page_bytes * PAGE_ID_BYTES
        above = node
        chain: list[Node] = []
        place = node.mutable_children()
        first = tokens[at : at + self._page_bytes]
        for begin in range(0, len(pages), step):
            ids = pages[begin : begin + step]
            end = at + len(ids) // PAGE_ID_BYTES * self._page_bytes
            self._last_node += 1
            child = Node(tree, self._last_node, tokens[at:end], ids, above, tick)
            if above is not node:
                above.children = {tokens[at : at + self._page_bytes]: child}
            chain.append(child)
            above, at = child, end
        top, last = chain[0], chain[-1]
        place[first], lease.node, lease.length = top, last, at // self._page_bytes
        tree.nodes += len(chain)
        tree.account.nodes += len(chain)
        tree.resident += count
        self.accounts.change(tree.account, count)
        if self._emit is not None:
            for child in chain:
                assert child.parent is not None
                size = child.size * self.page_size
                parent = child.parent.id
                self._emit(_INSERTED, child.id, parent, tree.index, size, 0, lease.request, tick)
        return last

    def _take_tail(self, node: Node, pages: int, why: int, tick: int, request: int = 0) -> bytes:
        """Take the last ``pages`` pages of a free leaf, and the leaf if none are left."""
        tree = node.tree
        account = tree.account
        parent = node.parent
        assert parent is not None
        page_bytes = self._page_bytes
        kept = node.size - pages
        taken = node.pages[kept * PAGE_ID_BYTES :]
        first_gone = node.key[kept * page_bytes : (kept + 1) * page_bytes]
        depth = kept + path_length(parent)
        if kept:
            # In this order: a longer key than pages is what a repair cuts.
            node.pages = node.pages[: kept * PAGE_ID_BYTES]
            node.key = node.key[: kept * page_bytes]
        else:
            siblings = parent.mutable_children()
            del siblings[first_gone]
            if not siblings:
                parent.children = NO_CHILDREN
            node.gone = True
            tree.nodes -= 1
            account.nodes -= 1
            account.victims.remove(node)
            account.victims.add(parent)
        tree.resident -= pages
        account.evicted += pages
        tree.evicted += pages
        self.accounts.change(account, -pages)
        account.ghosts.add(node if kept else parent, depth, first_gone, tick, why)
        if self._emit is not None:
            size = pages * self.page_size
            self._emit(_EVICTED, node.id, parent.id, tree.index, size, why, request, tick)
        if not kept:
            self._drop_if_empty(tree, tick)
        return taken

    def _open(self, namespace: Namespace, tick: int) -> Tree:
        self._last_tree += 1
        self._last_node += 1
        account = self.accounts.of(namespace.tenant)
        tree = Tree(namespace, account, self._last_tree, self._last_node, tick)
        self._trees[namespace] = account.trees[namespace] = tree
        if len(self.expiries) > 2 * len(self._trees) + 64:
            self.watch_expiry()  # most are of trees that are gone
        else:
            self.expiries.watch(tree)
        if self._emit is not None:
            self._emit(_OPENED, tree.root.id, 0, tree.index, account.index, 0, 0, tick)
        return tree

    def _graft(self, tree: Tree, behind: Behind | None, tick: int) -> Node:
        assert behind is not None
        self._last_node += 1
        root = Node(tree, self._last_node, b"", b"", None, tick)
        tree.grafts[behind.public] = root
        if self._emit is not None:
            self._emit(_GRAFTED, root.id, tree.root.id, tree.index, behind.public, 0, 0, tick)
        return root

    def _drop_if_empty(self, tree: Tree, tick: int) -> None:
        if tree.leases or tree.resident or self._trees.get(tree.namespace) is not tree:
            return
        del self._trees[tree.namespace]
        tree.account.trees.pop(tree.namespace, None)
        if self._emit is not None:
            self._emit(_CLOSED, 0, 0, tree.index, 0, 0, 0, tick)

    # Locks.

    def _lock(self, node: Node, tick: int, pages: list[bytes] | None, *, hit: bool) -> None:
        """Lock and touch the path from ``node`` to the root; collect its pages, bottom first."""
        tree = node.tree
        tree.last_used = tick
        newly = 0
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                newly += len(step.pages)
                if step.queued is not None:
                    tree.account.victims.remove(step)
            step.locks += 1
            step.last_used = tick
            if hit:
                step.hits += 1
            if pages is not None:
                pages.append(step.pages)
            step = step.parent
        if newly:
            newly //= PAGE_ID_BYTES
            tree.locked += newly
            self.accounts.change(tree.account, 0, newly)

    def _unlock(self, node: Node) -> None:
        freed = 0
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            if step.locks == 0:
                freed += len(step.pages)
            step = step.parent
        tree = node.tree
        if freed:
            freed //= PAGE_ID_BYTES
            tree.locked -= freed
            self.accounts.change(tree.account, 0, -freed)
        tree.account.victims.add(node)


def _root(tree: Tree, behind: Behind | None) -> Node | None:
    return tree.root if behind is None else tree.grafts.get(behind.public)


def _raise_priority(node: Node, priority: int) -> None:
    step: Node | None = node
    while step is not None:
        step.priority = max(step.priority, priority)
        step = step.parent
