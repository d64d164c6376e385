"""Pages for running sequences: the one place where the pool and the forest meet.

Every page is in exactly one of four states::

    free       on the pool's free list
    locked     in the forest, under a lease
    evictable  in the forest, under none
    private    held by one running sequence, not (yet) in the forest

and ``free + locked + evictable + private == total`` after every call, also one that raised.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from ktserve.cache.accounts import PUBLIC_TENANT, Account, Accounts, Room
from ktserve.cache.forest import Behind, RadixForest
from ktserve.cache.kept import CacheError, Kept, Pin, PublicPrefix
from ktserve.cache.node import PAGE_ID_BYTES, Lease, Tree, path_pages
from ktserve.cache.policies import EvictionPolicy
from ktserve.cache.pool import PagePool
from ktserve.cache.reasons import Reason
from ktserve.cache.records import Kind, Records, Why
from ktserve.cache.repair import repair
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing, Share
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import TOKEN_BYTES

log = logging.getLogger("ktserve.cache")

_CROWD_PART = 16
"""At the limit of namespaces this part of them goes at once, so that the search for the emptiest
is spread over as many openings."""

P = ParamSpec("P")
R = TypeVar("R")


def _recovering(
    operation: Callable[Concatenate[CacheManager, P], R],
) -> Callable[Concatenate[CacheManager, P], R]:
    """An exception at any point of ``operation`` leaves the books right."""

    @functools.wraps(operation)
    def guarded(self: CacheManager, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return operation(self, *args, **kwargs)
        except BaseException:
            self.repair()
            raise

    return guarded


class CacheManager:
    """Opens, grows and closes block tables, evicting where the free list does not suffice.

    Args:
        enabled: whether anything is kept and found; otherwise every prompt is computed in full.
        sharing: how tenants share the pool.
        policy: the order in which a tenant's own pages go.
        quotas: of the tenants; one that is not here keeps nothing from the others.
        max_namespaces: of one tenant; beyond, the emptiest and oldest go.
        max_nodes: of one tenant's trees together; beyond, leaves go by the policy. None: as many
            as there are pages.
        pin_budget: the most of the pool, as a share, that pins and public prefixes take.
        reserve_public: keep that much of the pool for public prefixes. Without it there are none.
        records: where changes are told.
        clock: nanoseconds that never go back.

    Attributes:
        pool: the free list.
        forest: what is cached.
        accounts: what each tenant holds and may hold.
        kept: what operators keep from eviction.
        tables: the open ones.
        repairs: times that the books were recounted after an error.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        *,
        enabled: bool = True,
        sharing: CacheSharing = "floors",
        policy: EvictionPolicy = "lru",
        quotas: Mapping[str, Quota] | None = None,
        max_namespaces: int = 10_000,
        max_nodes: int | None = None,
        pin_budget: float = 0.1,
        reserve_public: bool = False,
        records: Records | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.enabled = enabled
        budget = int(pool.total * pin_budget)
        self.accounts = Accounts(
            pool.total,
            sharing=sharing,
            policy=policy,
            quotas=quotas or {},
            reserved=budget if reserve_public else 0,
        )
        self.forest = RadixForest(page_size, self.accounts, records=records, clock=clock)
        self.kept = Kept(self.forest, budget=budget, public_allowed=reserve_public)
        self.tables: set[BlockTable] = set()
        self.repairs = 0
        self._records = records
        self._max_namespaces = max_namespaces
        self._max_nodes = pool.total if max_nodes is None else max_nodes
        self._checks = 0

    # What there is.

    @property
    def available(self) -> int:
        """Pages that no running sequence, pin or public prefix holds: free and evictable ones."""
        return self.pool.free + self.accounts.evictable

    @property
    def used(self) -> int:
        """Pages that are kept from being handed out."""
        return self.pool.total - self.available

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_size)

    @property
    def partitioned(self) -> bool:
        """Whether no tenant's pages can ever come to another."""
        return self.accounts.sharing == "partitioned"

    def rooms(self, tenant: str) -> Room:
        """Pages that a sequence of ``tenant`` could get now."""
        return self.accounts.rooms(self.accounts.of(tenant))

    def may_take(self, taker: str, giver: str) -> bool:
        """Whether a page that ``giver``'s sequence lets go of can come to one of ``taker``."""
        return self.accounts.may_take(self.accounts.of(taker), self.accounts.of(giver))

    def capacity(self, tenant: str) -> int:
        """Pages that one sequence of ``tenant`` can ever get."""
        return self.accounts.of(tenant).share.capacity

    def fit_together(self, needs: Mapping[str, int]) -> bool:
        """Whether sequences could hold so many pages, by tenant, all at once.

        What others keep up to their floors cannot be had, so a floor counts in full.
        """
        beyond = 0
        for tenant, need in needs.items():
            share = self.accounts.of(tenant).share
            if need > share.cap:
                return False
            beyond += max(0, need - share.floor)
        return self.accounts.floors + beyond <= self.pool.total

    def balanced(self) -> bool:
        """Whether every page is in exactly one state, by count. Cheap enough for every step.

        The totals each time, and the accounts in turn.
        """
        accounts = self.accounts
        states = self.pool.free + accounts.resident + accounts.private
        if states != self.pool.total or not 0 <= accounts.locked <= accounts.resident:
            return False
        self._checks += 1
        return accounts.sound(self._checks)

    # A sequence's life.

    def peek(self, namespace: Namespace, prompt: bytes) -> tuple[int, int]:
        """What `open` would find: cached pages, and how many of them it would make unavailable."""
        limit = self._cacheable(prompt)
        behind = _behind(self.kept.base_for(namespace, prompt, limit))
        return self.forest.peek(namespace, prompt, limit, behind)

    @_recovering
    def open(
        self,
        namespace: Namespace,
        prompt: bytes,
        *,
        request: int = 0,
        insert: bool = True,
        lookup: bool = True,
        priority: int = 0,
        first: bool = True,
    ) -> BlockTable:
        """Lease the longest cached prefix of ``prompt`` and start a block table with it.

        At least the prompt's last token is left to compute, since its logits are needed.

        Args:
            request: for whom, for records.
            insert: keep what is computed.
            lookup: look for a prefix.
            priority: for the eviction policy of that name.
            first: the request was not opened before; otherwise it counts as no use and no lookup.
        """
        limit = self._cacheable(prompt) if lookup else 0
        why = int(Why.LOOKUP if first else Why.RESUMED)
        public = self.kept.base_for(namespace, prompt, limit)
        base = None
        if public is not None and public.lease is not None:
            node = public.lease.node
            base = self.forest.share(node, public.pages, request=request, why=why)
        lease, parts, reason = self.forest.match(
            namespace,
            prompt,
            limit,
            request=request,
            why=why,
            priority=priority,
            behind=_behind(public),
        )
        tree = lease.node.tree
        tokens = len(prompt) // TOKEN_BYTES
        capacity = max(16, 2 * self.pages_for(tokens))
        table = BlockTable(
            namespace, tree.account, base, lease, capacity, insert=insert, priority=priority
        )
        if base is not None:
            parts = [path_pages(base.node), *parts]
        table.pages[: lease.length] = np.frombuffer(b"".join(parts), dtype=np.int64)
        table.cached_tokens = lease.length * self.page_size
        if first:
            table.reason = self._reason(reason, tokens, lookup=lookup)
            if self.enabled and lookup:
                self.accounts.note_lookup(tree, tokens, table.cached_tokens)
        if len(tree.account.trees) > self._max_namespaces and not _is_public(tree.account):
            crowd = max(1, self._max_namespaces // _CROWD_PART)
            self._free(self.forest.flush(self.forest.emptiest(tree.account, crowd), Why.NAMESPACES))
        self._trim(tree.account)
        self.tables.add(table)  # last: a caller that gets an exception has no table to close
        return table

    @_recovering
    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for ``tokens`` tokens in all; False, and nothing changed, if there is none."""
        missing = self.pages_for(tokens) - table.length
        if missing <= 0:
            return True
        account = table.account
        if missing > min(self.accounts.rooms(account)):
            return False
        own = max(0, account.held + missing - account.share.cap)
        shortfall = max(own, missing - self.pool.free)
        if shortfall > 0:
            self._free(self.forest.evict(shortfall, account, own=own, lease=table.lease))
        end = table.length + missing
        if end > len(table.pages):
            table.pages = np.concatenate((table.pages, np.empty(end, dtype=np.int64)))
        table.pages[table.length : end] = self.pool.take(missing)
        table.length = end
        self.accounts.change(account, private=missing)
        return True

    @_recovering
    def commit(self, table: BlockTable, tokens: bytes) -> None:
        """Put the complete pages of ``tokens`` into the forest; the table's lease then covers them.

        Where another sequence has put the same tokens there first, the table goes on with those
        pages and its own go back: both hold the same keys and values.

        Args:
            table: an open table.
            tokens: every token of the sequence whose keys and values are written.
        """
        self._commit(table, tokens)

    @_recovering
    def close(self, table: BlockTable, tokens: bytes) -> None:
        """End a sequence: keep what it computed in the forest, give everything else up.

        The one way out for every ending. A second call does nothing.

        Args:
            table: the sequence's table.
            tokens: every token whose keys and values are written; empty keeps nothing more.
        """
        if table not in self.tables:
            return
        # First, so that also a close that raises has closed: a repair then counts the table's own
        # pages as nobody's.
        self.tables.remove(table)
        self._commit(table, tokens)
        private = table.private
        self.pool.give_back(table.pages[table.lease.length : table.length])
        table.length = table.lease.length
        account = table.account
        self.accounts.change(account, private=-private)
        self.forest.release(table.lease)
        self._flush_withdrawn(table.lease)
        if table.base is not None:
            self.forest.release(table.base)
            self._flush_withdrawn(table.base)
        self._trim(account)

    # Forgetting.

    def flush(self, namespace: Namespace | None = None) -> int:
        """Forget what no lease covers, of one namespace or of all; returns the pages freed."""
        if namespace is None:
            return self._flush(self.forest.trees(), Why.FLUSHED)
        tree = self.forest.tree(namespace)
        return 0 if tree is None else self._flush([tree], Why.FLUSHED)

    @_recovering
    def expire(self) -> int:
        """Forget namespaces that lay unused beyond their tenant's ``cache_ttl``; pages freed."""
        expired = self.forest.expired()
        return self._free(self.forest.flush(expired, Why.EXPIRED)) if expired else 0

    @property
    def next_expiry(self) -> int | None:
        """Nanoseconds until `expire` can have something to do; None: it never will."""
        return self.forest.next_expiry

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Divide the pool anew. Pages beyond a tenant's new cap go now, or when they come free.

        Raises:
            ValueError: the quotas cannot be had together; nothing has changed.
        """
        self._divide(quotas, self.accounts.divide(quotas))

    # What operators keep.

    def pin(self, namespace: Namespace, tokens: bytes) -> Pin:
        """Keep the longest cached prefix of ``tokens`` from eviction, until `unpin`.

        Behind a public prefix, which is kept anyway, it is what the namespace has of its own.

        A pin gives way only where a request could not run at all beside it (`yield_pin`).

        Raises:
            CacheError: nothing of it is cached, or the budget does not allow it.
        """
        pages = len(tokens) // TOKEN_BYTES // self.page_size
        behind = _behind(self.kept.base_for(namespace, tokens, pages))
        own = self.forest.peek(namespace, tokens, pages, behind)[0]
        own -= 0 if behind is None else behind.pages
        if not own:
            raise CacheError(
                "nothing of this prefix is cached in its namespace; send it once, then pin it"
            )
        self.kept.check_budget(own, "the pin")
        return self._pin(namespace, tokens, pages, behind)

    def unpin(self, pin_id: int) -> None:
        """Let the pinned prefix be evicted again.

        Raises:
            CacheError: there is no such pin.
        """
        if pin_id not in self.kept.pins:
            raise CacheError(f"there is no pin {pin_id}; it was removed, or gave way to a request")
        self._unpin(pin_id)

    def yield_pin(self, tenant: str, *, own: bool) -> bool:
        """Give up the oldest pin whose pages ``tenant`` could use; False where there is none.

        Args:
            own: it lacks pages below its cap, for which only its own pins help.
        """
        taker = self.accounts.of(tenant)
        for pin in self.kept.pins.values():
            giver = pin.lease.node.tree.account
            if giver is taker or (not own and self.accounts.may_take(taker, giver)):
                log.warning(
                    "pin %d (%d pages) gives way: a request could not run beside it",
                    pin.id,
                    pin.pages,
                )
                self._unpin(pin.id)
                return True
        return False

    def publish(self, name: str, readers: Collection[str], tokens: bytes) -> PublicPrefix:
        """Register a public prefix; its readers find it once it was computed and `hold` called.

        An equal one stays as it is; another one of the same name is withdrawn.

        Raises:
            CacheError: see `Kept.registration`.
        """
        prefix = self.kept.registration(name, readers, tokens)
        if self.kept.public.get(name) is not prefix:
            self._register(prefix)
        return prefix

    @_recovering
    def hold(self, prefix: PublicPrefix) -> bool:
        """Keep a public prefix that was computed under its namespace, and show it to its readers.

        Returns:
            False: it is not cached in full, or was withdrawn meanwhile.
        """
        if self.kept.public.get(prefix.name) is not prefix or prefix.lease is not None:
            return False
        if self.forest.peek(prefix.namespace, prefix.tokens, prefix.pages)[0] < prefix.pages:
            return False
        prefix.lease = self.forest.match(
            prefix.namespace, prefix.tokens, prefix.pages, why=Why.PINNED
        )[0]
        return True

    @_recovering
    def withdraw(self, name: str) -> None:
        """End a public prefix; who reads it at the moment goes on. Unknown names are ignored."""
        prefix = self.kept.public.pop(name, None)
        if prefix is not None:
            self._retire(prefix)

    def leases(self) -> list[Lease]:
        """Every lease that somebody holds: tables, pins and public prefixes."""
        held = [table.lease for table in self.tables]
        held += [table.base for table in self.tables if table.base is not None]
        return held + self.kept.leases()

    def repair(self) -> None:
        """Recount everything from the trees, the tables and the leases. Slow, and never wrong."""
        self.repairs += 1
        log.error("an error inside the cache: its books are recounted")
        repair(self)
        if self._records is not None:
            self._records.emit(Kind.REPAIRED, 0, 0, 0, 0, 0, 0, self.forest.now())

    # Inside.

    @_recovering
    def _divide(self, quotas: Mapping[str, Quota], shares: dict[str, Share]) -> None:
        self.accounts.set_quotas(quotas, shares)
        self.forest.watch_expiry()
        for account in self.accounts:
            self._trim(account)

    def _trim(self, account: Account) -> None:
        """Bring an account below its limits, as far as its pages are free to go."""
        if (over := account.held - account.share.cap) > 0:
            self._free(self.forest.shrink(account, Why.QUOTA, pages=over))
        if account.nodes > self._max_nodes and not _is_public(account):
            self._free(
                self.forest.shrink(account, Why.NODES, nodes=account.nodes - self._max_nodes)
            )

    def _commit(self, table: BlockTable, tokens: bytes) -> None:
        lease = table.lease
        length = lease.length
        end = len(tokens) // TOKEN_BYTES // self.page_size
        if not self.enabled or not table.insert or end <= length:
            return
        whole = tokens[: end * self.page_size * TOKEN_BYTES]
        own = table.pages[length:end].tobytes()
        for position, theirs in self.forest.extend(lease, whole, own, table.priority):
            ids = np.frombuffer(theirs, dtype=np.int64)
            mine = slice(position, position + len(ids))
            self.pool.give_back(table.pages[mine])
            table.pages[mine] = ids
        self.accounts.change(table.account, private=length - lease.length)
        self._trim(table.account)

    def _reason(self, found: Reason, tokens: int, *, lookup: bool) -> Reason:
        if not self.enabled:
            return Reason(kind="disabled")
        if not lookup:
            return Reason(kind="opted_out")
        if tokens <= self.page_size:
            return Reason(kind="below_page")
        return found

    @_recovering
    def _register(self, prefix: PublicPrefix) -> None:
        known = self.kept.public.get(prefix.name)
        self.kept.public[prefix.name] = prefix
        if known is not None:
            self._retire(known)

    def _retire(self, prefix: PublicPrefix) -> None:
        """Forget what was kept for a public prefix that is not registered any more."""
        if prefix.lease is not None:
            self.forest.release(prefix.lease)
        tree = self.forest.tree(prefix.namespace)
        if tree is not None:
            self._free(self.forest.flush([tree], Why.FLUSHED))

    def _flush_withdrawn(self, lease: Lease) -> None:
        """Forget a public prefix that was withdrawn while ``lease``, now released, was on it."""
        if self.kept.withdrawn(lease.node.tree):
            self._free(self.forest.flush([lease.node.tree], Why.FLUSHED))

    @_recovering
    def _flush(self, trees: Iterable[Tree], why: Why) -> int:
        return self._free(self.forest.flush(trees, why))

    def _free(self, pages: bytes) -> int:
        self.pool.give_back(np.frombuffer(pages, dtype=np.int64))
        return len(pages) // PAGE_ID_BYTES

    @_recovering
    def _pin(self, namespace: Namespace, tokens: bytes, pages: int, behind: Behind | None) -> Pin:
        lease = self.forest.match(namespace, tokens, pages, why=Why.PINNED, behind=behind)[0]
        # A public prefix before it is not the pin's to keep.
        lease.length -= 0 if behind is None else behind.pages
        pin = Pin(self.kept.next_id(), lease, lease.length)
        self.kept.pins[pin.id] = pin
        self._trim(lease.node.tree.account)
        return pin

    @_recovering
    def _unpin(self, pin_id: int) -> None:
        lease = self.kept.pins.pop(pin_id).lease
        self.forest.release(lease)
        self._trim(lease.node.tree.account)

    def _cacheable(self, prompt: bytes) -> int:
        return (len(prompt) // TOKEN_BYTES - 1) // self.page_size if self.enabled else 0


def _behind(public: PublicPrefix | None) -> Behind | None:
    return None if public is None else public.behind


def _is_public(account: Account) -> bool:
    """Whether it is that of the public prefixes, which an operator bounds and not a client."""
    return account.tenant == PUBLIC_TENANT
