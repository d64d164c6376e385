"""Pages for running sequences: the one place where the pool and the forest meet.

Every page is in exactly one of four states::

    free       on the pool's free list
    locked     in the forest, under a lease
    evictable  in the forest, under none
    private    held by one running sequence, not (yet) in the forest

and ``free + locked + evictable + private == total`` after every call.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ktserve.cache.forest import Lease, RadixForest
from ktserve.cache.pool import PageIds, PagePool
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import TOKEN_BYTES


class BlockTable:
    """The pages of one running sequence: a leased prefix, then pages of its own.

    Attributes:
        namespace: whose tree the prefix is leased from and the rest goes to.
        cached_tokens: tokens whose keys and values came from the cache when it was opened.
        pages: page ids in order, int64; the first `length` of them are valid.
        length: pages held, leased and private.
        lease: over the first ``lease.length`` of them.
    """

    __slots__ = ("cached_tokens", "lease", "length", "namespace", "pages")

    def __init__(self, namespace: Namespace, lease: Lease, pages: PageIds, page_size: int) -> None:
        self.namespace = namespace
        self.lease = lease
        self.length = lease.length
        self.pages = pages
        self.cached_tokens = lease.length * page_size

    @property
    def private(self) -> int:
        """Pages that are this sequence's alone."""
        return self.length - self.lease.length


class CacheManager:
    """Opens, grows and closes block tables, evicting where the free list does not suffice.

    Attributes:
        pool: the free list.
        forest: what is cached.
        private: pages held by running sequences alone, by tenant.
        enabled: whether anything is kept and found; otherwise every prompt is computed in full.
    """

    def __init__(self, pool: PagePool, page_size: int, *, enabled: bool = True) -> None:
        self.pool = pool
        self.page_size = page_size
        self.forest = RadixForest(page_size)
        self.private: Counter[str] = Counter()
        self.enabled = enabled

    @property
    def available(self) -> int:
        """Pages that could be handed out now: free ones and evictable ones."""
        return self.pool.free + self.forest.evictable

    @property
    def used(self) -> int:
        """Pages that running sequences keep from being handed out."""
        return self.pool.total - self.available

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_size)

    def peek(self, namespace: Namespace, prompt: bytes) -> tuple[int, int]:
        """What `open` would find: cached pages, and how many of them it would make unavailable."""
        return self.forest.peek(namespace, prompt, self._cacheable(prompt))

    def open(self, namespace: Namespace, prompt: bytes) -> BlockTable:
        """Lease the longest cached prefix of ``prompt`` and start a block table with it.

        At least the prompt's last token is left to compute, since its logits are needed.
        """
        lease, parts = self.forest.match(namespace, prompt, self._cacheable(prompt))
        pages = np.empty(max(16, 2 * self.pages_for(len(prompt) // TOKEN_BYTES)), dtype=np.int64)
        if parts:
            pages[: lease.length] = np.concatenate(parts)
        return BlockTable(namespace, lease, pages, self.page_size)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for ``tokens`` tokens in all; False, and nothing changed, if there is none."""
        missing = self.pages_for(tokens) - table.length
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        shortfall = missing - self.pool.free
        if shortfall > 0:
            self.pool.give_back(self.forest.evict(shortfall))
        end = table.length + missing
        if end > len(table.pages):
            table.pages = np.concatenate((table.pages, np.empty(end, dtype=np.int64)))
        table.pages[table.length : end] = self.pool.take(missing)
        table.length = end
        self._count_private(table, missing)
        return True

    def commit(self, table: BlockTable, tokens: bytes) -> None:
        """Put the complete pages of ``tokens`` into the forest; the table's lease then covers them.

        Where another sequence has put the same tokens there first, the table goes on with those
        pages and its own go back: both hold the same keys and values.

        Args:
            table: an open table.
            tokens: every token of the sequence whose keys and values are written.
        """
        end = len(tokens) // TOKEN_BYTES // self.page_size
        if not self.enabled or end <= table.lease.length:
            return
        whole = tokens[: end * self.page_size * TOKEN_BYTES]
        before = table.private
        for position, theirs in self.forest.extend(table.lease, whole, table.pages):
            mine = slice(position, position + len(theirs))
            self.pool.give_back(table.pages[mine])
            table.pages[mine] = theirs
        self._count_private(table, table.private - before)

    def close(self, table: BlockTable, tokens: bytes) -> None:
        """End a sequence: keep what it computed in the forest, give everything else up.

        The one way out for every ending. A second call does nothing.

        Args:
            table: the sequence's table.
            tokens: every token whose keys and values are written; empty keeps nothing more.
        """
        if not table.lease.held:
            return
        self.commit(table, tokens)
        private = table.private
        self.pool.give_back(table.pages[table.lease.length : table.length])
        table.length = table.lease.length
        self._count_private(table, -private)
        self.forest.release(table.lease)

    def flush(self, namespace: Namespace | None = None) -> int:
        """Forget what no lease covers, of one namespace or of all; returns the pages freed."""
        pages = self.forest.flush(namespace)
        self.pool.give_back(pages)
        return len(pages)

    def balanced(self) -> bool:
        """Whether every page is in exactly one state, by count. Cheap enough for every step."""
        states = self.pool.free + self.forest.resident + self.private.total()
        return states == self.pool.total and 0 <= self.forest.locked <= self.forest.resident

    def _cacheable(self, prompt: bytes) -> int:
        return (len(prompt) // TOKEN_BYTES - 1) // self.page_size if self.enabled else 0

    def _count_private(self, table: BlockTable, pages: int) -> None:
        tenant = table.namespace.tenant
        self.private[tenant] += pages
        if not self.private[tenant]:
            del self.private[tenant]
