"""A forest of many prompts and the operations that are timed on it."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from ktserve.bench.workloads import Figure
from ktserve.cache.forest import EDGE_TOKENS
from ktserve.cache.manager import CacheManager
from ktserve.cache.node import Lease
from ktserve.cache.pool import PageIds, PagePool
from ktserve.cache.records import Records, Why
from ktserve.cache.walk import path
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import TOKEN_BYTES

TURN_TOKENS = 256
"""By how much a conversation grows at a time."""

FILLER_TOKENS = 128
"""Tokens of each prompt that only fills the forest."""

EVICTED_TOKENS = 64

FLOORS = 0.5
"""The tenants' floors, as a part of what the filling gives each: all have something to give."""

MEMORY_NODES = 5_000
"""Over so many nodes memory is measured: enough that the tables' steps of growth matter little."""

R = TypeVar("R")


class FilledForest:
    """A cache with so many prompts of `FILLER_TOKENS` in it.

    Args:
        nodes: their number; each is a node.
        page_size: tokens a page.
        namespaces: that hold them in turn; at least one for each tenant.
        tenants: of equal weight.
        recorded: whether changes are recorded.
        spare_tokens: room in the pool beside the filling.
    """

    def __init__(
        self,
        *,
        nodes: int,
        page_size: int,
        namespaces: int,
        tenants: int,
        recorded: bool,
        spare_tokens: int,
    ) -> None:
        self._page_size = page_size
        self._random = np.random.default_rng(0)
        filler = max(1, FILLER_TOKENS // page_size)
        names = [f"tenant-{n}" for n in range(tenants)]
        self._namespaces = [
            Namespace(
                tenant=names[n % tenants], cache_salt=f"salt-{n}", extra_key=None, adapter=None
            )
            for n in range(max(namespaces, tenants))
        ]
        filling = nodes * filler
        pool = PagePool(filling + spare_tokens // page_size + filler)
        quota = Quota(cache_floor=FLOORS * filling / tenants / pool.total)
        self._cache = CacheManager(
            pool,
            page_size,
            quotas=dict.fromkeys(names, quota),
            records=Records() if recorded else None,
        )
        self._forest = self._cache.forest
        for n in range(nodes):
            namespace = self._namespaces[n % len(self._namespaces)]
            self._insert(namespace, self._tokens(filler * page_size))

    # What is timed.

    def prompts(self, tokens: int) -> dict[str, bytes]:
        """Prompts of ``tokens`` tokens that lie in the forest, by how they came there.

        *at once*: by one request. *grown*: as a conversation, by `TURN_TOKENS` a turn. *forked*:
        the same, and at each turn another prompt goes on differently, so that each turn is a node.
        """
        found = {lies: self._tokens(tokens) for lies in ("at once", "grown", "forked")}
        namespace = self._namespaces[0]
        self._insert(namespace, found["at once"])
        for end in range(TURN_TOKENS, tokens + 1, TURN_TOKENS):
            self._insert(namespace, found["grown"][: end * TOKEN_BYTES])
            turn = found["forked"][: end * TOKEN_BYTES]
            self._insert(namespace, turn)
            if end < tokens:
                self._insert(namespace, turn + self._tokens(self._page_size))
        return found

    def lookups(self, prompt: bytes, name: str, repetitions: int) -> Iterator[Figure]:
        """Finding how much of ``prompt`` is there, and a lease on it with its page ids."""
        namespace, forest, pages = self._namespaces[0], self._forest, self._pages(prompt)
        for _ in range(repetitions):
            figure, (found, _) = _timed(
                f"lookup, {name}", lambda: forest.peek(namespace, prompt, pages)
            )
            _expect(found == pages)
            yield figure

        def match() -> tuple[Lease, PageIds]:
            lease, parts, _ = forest.match(namespace, prompt, pages)
            return lease, np.frombuffer(b"".join(parts), dtype=np.int64)

        for _ in range(repetitions):
            figure, (lease, ids) = _timed(f"lookup with page ids, {name}", match)
            _expect(len(ids) == pages)
            yield figure
            forest.release(lease)

    def locks(self, prompt: bytes, name: str, repetitions: int) -> Iterator[Figure]:
        """A lease on a prefix whose end is known, and giving it up."""
        namespace, forest, pages = self._namespaces[0], self._forest, self._pages(prompt)
        held = forest.match(namespace, prompt, pages)[0]
        forest.release(held)
        for _ in range(repetitions):
            locked, lease = _timed(
                f"lock, {name}", lambda: forest.share(held.node, pages, request=0, why=Why.LOOKUP)
            )
            unlocked, _ = _timed(f"unlock, {name}", lambda: forest.release(lease))  # noqa: B023
            yield locked
            yield unlocked
            yield Figure(f"lock and unlock, {name}", locked.value + unlocked.value, "us", "less")

    def insertions(self, tokens: int, repetitions: int) -> Iterator[Figure]:
        """A new prompt behind an empty lease, and then a lease that ends within one of its edges.

        The cut is in the middle of the edge: it may be anywhere and costs the same.
        """
        namespace, forest = self._namespaces[0], self._forest
        tree = forest.tree(namespace)
        assert tree is not None
        pages = tokens // self._page_size
        edge = max(1, EDGE_TOKENS // self._page_size)
        cut = pages // 2
        if cut % edge == 0 and cut:
            cut -= edge // 2
        for _ in range(repetitions):
            prompt = self._tokens(tokens)
            lease = forest.match(namespace, prompt, pages)[0]
            own = self._cache.pool.take(pages).tobytes()
            figure, _ = _timed(
                f"insert, {tokens:,} tokens",
                lambda: forest.extend(lease, prompt, own),  # noqa: B023
            )
            yield figure
            forest.release(lease)
            before = tree.nodes
            figure, lease = _timed(
                f"split and lease, {tokens:,} tokens",
                lambda: forest.match(namespace, prompt, cut)[0],  # noqa: B023
            )
            _expect(tree.nodes == before + 1)
            yield figure
            forest.release(lease)

    def evictions(self, repetitions: int) -> Iterator[Figure]:
        """Giving up a few pages of a full forest, and their way back to the pool."""
        count = -(-EVICTED_TOKENS // self._page_size)
        yield from self._evict(count, f"evict {EVICTED_TOKENS} tokens", repetitions)
        self._use_all()
        yield from self._evict(count, f"evict {EVICTED_TOKENS} tokens, all used again before", 1)

    def _evict(self, count: int, name: str, repetitions: int) -> Iterator[Figure]:
        forest, pool = self._forest, self._cache.pool
        taker = self._cache.accounts.of(self._namespaces[0].tenant)
        for _ in range(repetitions):
            figure, packed = _timed(name, lambda: forest.evict(count, taker))
            pages = np.frombuffer(packed, dtype=np.int64)
            _expect(len(pages) == count)
            yield figure
            freed, _ = _timed(f"give back, {name}", lambda: pool.give_back(pages))  # noqa: B023
            yield freed

    def request(self, tokens: int, name: str) -> Figure:
        """A request with a prompt that nobody sent before, from `open` to `close`."""
        cache, namespace, prompt = self._cache, self._namespaces[0], self._tokens(tokens)

        def serve() -> bool:
            table = cache.open(namespace, prompt)
            grown = cache.grow(table, tokens)
            cache.commit(table, prompt)
            cache.close(table, prompt)
            return grown

        figure, grown = _timed(name, serve)
        _expect(grown)
        return figure

    def fill_up(self) -> None:
        """Leave no page free, so that whatever comes evicts something."""
        longest = EDGE_TOKENS // self._page_size
        while free := self._cache.pool.free:
            self._insert(self._namespaces[0], self._tokens(min(free, longest) * self._page_size))

    # What it is like.

    @property
    def free_pages(self) -> int:
        """Pages of the pool that nobody holds."""
        return self._cache.pool.free

    def givers(self) -> int:
        """Tenants that hold something which another one may take."""
        return sum(account.spare > 0 for account in self._cache.accounts)

    def path_nodes(self, prompt: bytes) -> int:
        """Nodes in which ``prompt`` lies."""
        pages = self._pages(prompt)
        lease = self._forest.match(self._namespaces[0], prompt, pages)[0]
        self._forest.release(lease)
        return len(path(lease.node)) - 1  # without the root

    # How it is set up.

    @classmethod
    def memory(cls, page_size: int) -> Figure:
        """Bytes a node, of everything that filling a forest allocates and keeps.

        Tokens and page ids are left out, and so are the tokens of its first page by which a node
        is found from above. Counted are the objects around them, the nodes, the tables of
        children, the order of eviction and the numbers.
        """
        one = cls(
            nodes=1,
            page_size=page_size,
            namespaces=1,
            tenants=1,
            recorded=False,
            spare_tokens=MEMORY_NODES * max(FILLER_TOKENS, page_size),
        )
        length = max(FILLER_TOKENS, page_size) // page_size * page_size
        content = one._content()
        tracemalloc.start(1)
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(MEMORY_NODES):
                one._insert(one._namespaces[0], one._tokens(length))
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        nodes = sum(tree.nodes for tree in one._forest.trees()) - 1
        each = (after - before - one._content() + content) / nodes
        return Figure("memory besides keys and page ids", each, "bytes/node", "less")

    def _content(self) -> int:
        """Bytes of tokens and page ids."""
        page = self._page_size * TOKEN_BYTES
        return sum(
            len(node.key) + len(node.pages) + (page if len(node.key) > page else 0)
            for tree in self._forest.trees()
            for node in tree.walk()
        )

    def _use_all(self) -> None:
        """Use every node of the filling again, in any order."""
        nodes = [node for tree in self._forest.trees() for node in tree.walk()]
        random.Random(0).shuffle(nodes)
        for node in nodes:
            self._forest.release(self._forest.share(node, node.size, request=0, why=Why.LOOKUP))

    def _insert(self, namespace: Namespace, prompt: bytes) -> None:
        pages = self._pages(prompt)
        lease = self._forest.match(namespace, prompt, pages)[0]
        own = self._cache.pool.take(pages - lease.length).tobytes()
        self._forest.extend(lease, prompt, own)
        self._forest.release(lease)

    def _pages(self, prompt: bytes) -> int:
        return len(prompt) // TOKEN_BYTES // self._page_size

    def _tokens(self, count: int) -> bytes:
        return self._random.integers(0, 50_000, count, dtype=np.int32).tobytes()


def _timed(name: str, operation: Callable[[], R]) -> tuple[Figure, R]:
    began = time.perf_counter_ns()
    result = operation()
    nanoseconds = time.perf_counter_ns() - began
    return Figure(name, nanoseconds / 1000, "us", "less"), result


def _expect(holds: bool) -> None:
    """What was timed has to have happened."""
    if not holds:
        raise RuntimeError("an operation did something else than what is to be timed")
