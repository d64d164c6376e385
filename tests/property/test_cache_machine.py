"""Random operations on the cache against a model of it, with the whole invariant after each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ktserve.cache import forest
from ktserve.cache.accounts import PUBLIC_TENANT
from ktserve.cache.audit import audit
from ktserve.cache.kept import CacheError, PublicPrefix
from ktserve.cache.manager import CacheManager
from ktserve.cache.node import Lease, path_pages
from ktserve.cache.pool import PagePool
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack, unpack

NAMESPACES = [
    Namespace(tenant="a", cache_salt=None, extra_key=None, adapter=None),
    Namespace(tenant="a", cache_salt="bc", extra_key=None, adapter=None),
    Namespace(tenant="a", cache_salt=None, extra_key="bc", adapter=None),
    Namespace(tenant="ab", cache_salt="c", extra_key=None, adapter=None),
    Namespace(tenant="ab", cache_salt=None, extra_key=None, adapter=None),
]
TENANTS = ["a", "ab"]
QUOTAS: list[dict[str, Quota]] = [
    {"a": Quota(), "ab": Quota()},
    {"a": Quota(weight=3, cache_ttl=2), "ab": Quota()},
    {"a": Quota(cache_cap=0.6), "ab": Quota(cache_floor=0.3, cache_ttl=1)},
    {"a": Quota(cache_floor=0.5, cache_cap=0.5), "ab": Quota(cache_floor=0.5)},
    {"ab": Quota(cache_ttl=3)},
    {"a": Quota(cache_cap=0.3), "ab": Quota(cache_cap=0.3)},
]
IMPOSSIBLE = {"a": Quota(cache_floor=0.9), "ab": Quota(cache_floor=0.9)}
SETUP: dict[str, list[Any]] = {
    "page_size": [1, 2, 4],
    "pages": list(range(8, 41)),
    "sharing": ["floors", "shared", "partitioned"],
    "policy": ["lru", "lfu", "slru", "fifo", "priority"],
    "quotas": QUOTAS,
    "edge": [8192, 4, 8],
    "max_namespaces": [10_000, 2, 1],
    "max_nodes": [None, 4],
    "pin_budget": [0.3, 0.5],
    "reserve_public": [True, False],
    "enabled": [True] * 7 + [False],
}
SECOND = 1_000_000_000

# Two token ids and short prompts: prefixes meet, split and diverge all the time.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=16)
options = st.fixed_dictionaries(
    {},
    optional={
        "insert": st.booleans(),
        "lookup": st.booleans(),
        "first": st.booleans(),
        "priority": st.integers(0, 3),
    },
)
numbers = st.integers(0, 99)
running = precondition(lambda self: self.running)


class Sequence:
    def __init__(self, table: BlockTable, tokens: list[int]) -> None:
        self.table = table
        self.tokens = tokens
        self.written = table.cached_tokens


class CacheMachine(RuleBasedStateMachine):
    """Pages hold what was written to them, so a lease on a wrong page is seen at once."""

    @initialize(setup=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in SETUP.items()}))
    def start(self, setup: dict[str, Any]) -> None:
        setup = dict(setup)
        self.time = 1
        with mock.patch.object(forest, "EDGE_TOKENS", setup.pop("edge")):
            self.cache = CacheManager(
                PagePool(setup.pop("pages")), clock=lambda: self.time, **setup
            )
        self.setup = setup
        self.running: list[Sequence] = []
        # What each slot holds: the namespace and the whole prefix up to and including its token.
        self.slots: dict[int, tuple[Namespace, tuple[int, ...]]] = {}
        self.held = self.holdings()

    def holdings(self) -> dict[str, int]:
        return {account.tenant: account.held for account in self.cache.accounts}

    def slot(self, page: int, position: int) -> int:
        return page * self.cache.page_size + position % self.cache.page_size

    @contextmanager
    def for_tenant(self, tenant: str) -> Iterator[None]:
        """What happens for one tenant takes nothing from the others that they keep."""
        accounts = self.cache.accounts
        before = self.holdings()
        blamed = {account.tenant: account.evicted_by[tenant] for account in accounts}
        yield
        for account in accounts:
            name = account.tenant
            lost = before.get(name, 0) - account.held
            # A withdrawn prefix goes with its last reader, whoever that is.
            if name in (tenant, PUBLIC_TENANT) or lost <= 0:
                continue
            assert account.held >= account.share.floor
            assert account.evicted_by[tenant] - blamed[name] == lost
            # Only where quotas were lowered does a part hold more than its own.
            assert accounts.sharing != "partitioned" or before[name] > account.share.cap

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts, options=options)
    def open(self, namespace: Namespace, tokens: list[int], options: dict[str, Any]) -> None:
        prompt = pack(tokens)
        cache = self.cache
        expected, newly = cache.peek(namespace, prompt)
        if not options.get("lookup", True):
            expected = newly = 0
        locked = cache.accounts.locked
        account = cache.accounts.of(namespace.tenant)
        lookups, trees = account.lookups, len(account.trees)
        with self.for_tenant(namespace.tenant):
            table = cache.open(namespace, prompt, **options)
        assert cache.accounts.locked == locked + newly
        assert table.cached_tokens == expected * cache.page_size
        assert table.cached_tokens < len(tokens)
        sequence = Sequence(table, tokens)
        self.running.append(sequence)
        self.reads_its_own(sequence, table.cached_tokens)
        self.says_why(table, options)
        counted = cache.enabled and options.get("lookup", True) and options.get("first", True)
        assert account.lookups == lookups + counted
        idle = [tree for tree in account.trees.values() if not tree.leases]
        assert len(account.trees) <= max(self.setup["max_namespaces"], trees) or not idle
        self.nodes_are_few(table)

    def says_why(self, table: BlockTable, options: dict[str, Any]) -> None:
        reason = table.reason
        if not options.get("first", True):
            assert reason is None
            return
        assert reason is not None
        assert reason.tokens == table.cached_tokens
        assert (reason.kind == "disabled") == (not self.cache.enabled)
        if self.cache.enabled:
            assert (reason.kind == "opted_out") == (not options.get("lookup", True))
        if reason.kind in ("diverged", "evicted"):
            assert reason.at is not None
            assert reason.at >= reason.tokens

    def nodes_are_few(self, table: BlockTable) -> None:
        nodes = (node for tree in table.account.trees.values() for node in tree.walk())
        spare = any(not node.locks and not node.children for node in nodes)
        bounded = table.account.tenant != PUBLIC_TENANT
        assert table.account.nodes <= (self.setup["max_nodes"] or 999) or not (spare and bounded)

    @running
    @rule(which=numbers, count=st.integers(1, 8))
    def compute(self, which: int, count: int) -> None:
        self.write(self.running[which % len(self.running)], count)

    @running
    @rule(which=numbers)
    def prefill(self, which: int) -> None:
        """The ordinary case: all of a prompt, then into the forest."""
        sequence = self.running[which % len(self.running)]
        self.write(sequence, len(sequence.tokens))
        self.commit(which)

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts, options=options)
    def serve(self, namespace: Namespace, tokens: list[int], options: dict[str, Any]) -> None:
        """A request from beginning to end."""
        self.open(namespace, tokens, options)
        self.prefill(len(self.running) - 1)
        self.close(len(self.running) - 1, keep=True)

    def write(self, sequence: Sequence, count: int) -> None:
        cache, table = self.cache, sequence.table
        end = min(sequence.written + count, len(sequence.tokens))
        before, evicted, free = table.length, cache.accounts.evicted, cache.pool.free
        missing = max(0, cache.pages_for(end) - before)
        account = table.account
        beyond = account.held + missing - account.share.cap
        room = min(cache.rooms(account.tenant))
        with self.for_tenant(account.tenant):
            grown = cache.grow(table, end)
        assert grown == (missing <= max(0, room))
        if not grown:
            assert (table.length, cache.accounts.evicted) == (before, evicted)
            return
        if missing:
            # No page more than it needs.
            assert cache.accounts.evicted - evicted == max(0, beyond, missing - free)
        for position in range(sequence.written, end):
            page = int(table.pages[position // cache.page_size])
            self.slots[self.slot(page, position)] = (
                table.namespace,
                tuple(sequence.tokens[: position + 1]),
            )
        sequence.written = end

    @running
    @rule(which=numbers)
    def commit(self, which: int) -> None:
        sequence = self.running[which % len(self.running)]
        table = sequence.table
        before = length = table.lease.length
        with self.for_tenant(table.namespace.tenant):
            self.cache.commit(table, pack(sequence.tokens[: sequence.written]))
        if table.insert and self.cache.enabled:
            length = max(length, sequence.written // self.cache.page_size)
        if table.lease.length > before:
            self.nodes_are_few(table)
        assert table.lease.length == length

    @running
    @rule(which=numbers, more=st.integers(0, 1))
    def generate(self, which: int, more: int) -> None:
        self.running[which % len(self.running)].tokens.append(more)

    @running
    @rule(which=numbers, keep=st.booleans())
    def close(self, which: int, keep: bool) -> None:
        sequence = self.running.pop(which % len(self.running))
        tokens = pack(sequence.tokens[: sequence.written]) if keep else b""
        with self.for_tenant(sequence.table.namespace.tenant):
            self.cache.close(sequence.table, tokens)
            self.cache.close(sequence.table, tokens)
        self.nodes_are_few(sequence.table)

    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def flush(self, namespace: Namespace | None) -> None:
        trees = self.cache.forest.trees()
        free = sum(t.resident - t.locked for t in trees if namespace in (None, t.namespace))
        assert self.cache.flush(namespace) == free

    @rule(count=st.integers(1, 6), tenant=st.sampled_from(TENANTS))
    def evict_exactly(self, count: int, tenant: str) -> None:
        taker = self.cache.accounts.of(tenant)
        theirs = sum(account.spare for account in self.cache.accounts if account is not taker)
        available = taker.evictable + theirs
        with self.for_tenant(tenant):
            pages = np.frombuffer(self.cache.forest.evict(count, taker), dtype=np.int64)
        assert len(pages) == min(count, available)
        self.cache.pool.give_back(pages)

    @rule(seconds=st.sampled_from([0.1, 1, 5]))
    def wait(self, seconds: float) -> None:
        self.time += int(seconds * SECOND)

    @rule()
    def expire(self) -> None:
        self.cache.expire()
        watched = False
        for tree in self.cache.forest.trees():
            ttl = tree.account.quota.cache_ttl
            watched |= ttl is not None
            assert ttl is None or tree.leases or tree.last_used + ttl * SECOND > self.time
        assert watched <= (self.cache.next_expiry is not None)

    @rule(quotas=st.sampled_from([*QUOTAS, IMPOSSIBLE]))
    def set_quotas(self, quotas: dict[str, Quota]) -> None:
        accounts = self.cache.accounts
        shares = {account.tenant: account.share for account in accounts}
        try:
            self.cache.set_quotas(quotas)
        except ValueError:
            assert shares == {account.tenant: account.share for account in accounts}
            return
        for account in accounts:
            assert account.quota == quotas.get(account.tenant, Quota())
            assert account.held <= account.share.cap or not account.evictable

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts)
    def pin(self, namespace: Namespace, tokens: list[int]) -> None:
        cache = self.cache
        limit = len(tokens) // cache.page_size
        public = cache.kept.base_for(namespace, pack(tokens), limit)
        behind = None if public is None else public.behind
        found = cache.forest.peek(namespace, pack(tokens), limit, behind)[0]
        found -= 0 if public is None else public.pages
        fits = 0 < found <= self.budget() - self.kept()
        try:
            pin = cache.pin(namespace, pack(tokens))
        except CacheError:
            assert not fits
        else:
            assert fits
            assert pin.pages == found

    def budget(self) -> int:
        return int(self.cache.pool.total * self.setup["pin_budget"])

    def kept(self) -> int:
        public = self.cache.kept.public.values()
        return sum(p.pages for p in self.cache.kept.pins.values()) + sum(p.pages for p in public)

    @precondition(lambda self: self.cache.kept.pins.values())
    @rule(which=numbers)
    def unpin(self, which: int) -> None:
        pins = list(self.cache.kept.pins.values())
        self.cache.unpin(pins[which % len(pins)].id)

    @rule(tenant=st.sampled_from(TENANTS))
    def yield_pin(self, tenant: str) -> None:
        accounts, before = self.cache.accounts, list(self.cache.kept.pins.values())
        taker = accounts.of(tenant)
        usable = [pin for pin in before if accounts.may_take(taker, pin.lease.node.tree.account)]
        assert self.cache.yield_pin(tenant, own=False) == bool(usable)
        assert list(self.cache.kept.pins.values()) == [
            pin for pin in before if pin not in usable[:1]
        ]

    @rule(
        name=st.sampled_from(["p", "q"]),
        readers=st.sampled_from([["a"], ["a", "ab"]]),
        tokens=prompts,
        compute=st.booleans(),
    )
    def publish(self, name: str, readers: list[str], tokens: list[int], compute: bool) -> None:
        try:
            prefix = self.cache.publish(name, readers, pack(tokens))
        except CacheError:
            return
        assert self.cache.kept.public[name] is prefix
        if compute:
            self.compute_public(prefix)

    def compute_public(self, prefix: PublicPrefix) -> None:
        """As a request of its own; may find no room."""
        self.serve(prefix.namespace, [*unpack(prefix.tokens).tolist(), 0], {})
        found = self.cache.forest.peek(prefix.namespace, prefix.tokens, prefix.pages)[0]
        held = self.cache.hold(prefix)
        assert held <= (found == prefix.pages)
        assert (prefix.lease is not None) == (found == prefix.pages)

    @rule(name=st.sampled_from(["p", "q"]))
    def withdraw(self, name: str) -> None:
        self.cache.withdraw(name)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        audit(self.cache, [sequence.table for sequence in self.running])
        assert self.cache.repairs == 0
        assert self.kept() <= self.budget()
        for sequence in self.running:
            self.reads_its_own(sequence, sequence.written)
        for pin in self.cache.kept.pins.values():
            self.is_kept(pin.lease)
        for prefix in self.cache.kept.public.values():
            if prefix.lease is not None:
                self.is_kept(prefix.lease, unpack(prefix.tokens).tolist())
        for account in self.cache.accounts:
            # Nobody gets beyond a cap; who is there already (the cap was lowered) gets no further.
            assert account.held <= max(account.share.cap, self.held.get(account.tenant, 0))
        self.held = self.holdings()

    def reads_its_own(self, sequence: Sequence, end: int) -> None:
        """The right content, of this namespace or the public prefix alone."""
        table, size = sequence.table, self.cache.page_size
        base = table.base
        public = 0 if base is None else base.length * size
        for position in range(end):
            owner = table.namespace
            if base is not None and position < public:
                owner = base.node.tree.namespace
                assert owner.tenant == "@public"
            page = int(table.pages[position // size])
            assert self.slots[self.slot(page, position)] == (
                owner,
                tuple(sequence.tokens[: position + 1]),
            )

    def is_kept(self, lease: Lease, tokens: list[int] | None = None) -> None:
        pages = np.frombuffer(bytes(path_pages(lease.node)), dtype=np.int64).tolist()
        size = self.cache.page_size
        assert len(pages) == lease.length
        end = len(pages) * size
        owner, content = self.slots[self.slot(pages[-1], end - 1)]
        assert owner == lease.node.tree.namespace
        assert tokens is None or list(content) == tokens
        for position in range(end):
            page = pages[position // size]
            assert self.slots[self.slot(page, position)] == (owner, content[: position + 1])

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in self.running:
            self.cache.close(sequence.table, b"")
        for pin in list(self.cache.kept.pins.values()):
            self.cache.unpin(pin.id)
        for name in list(self.cache.kept.public):
            self.cache.withdraw(name)
        self.cache.flush()
        assert self.cache.pool.free == self.cache.pool.total
        assert list(self.cache.forest.trees()) == []
        assert np.array_equal(np.sort(self.cache.pool.free_ids()), np.arange(self.cache.pool.total))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(18))
def test_a_long_random_life(seed: int) -> None:
    """Long runs reach what short examples do not: deep trees, full pools, crowded prefixes."""
    draw = random.Random(seed)
    setup = {field: draw.choice(values) for field, values in SETUP.items()}
    # Every way of sharing under every policy and page size, at least once in three seeds.
    setup["sharing"] = SETUP["sharing"][seed % 3]
    setup["policy"] = SETUP["policy"][seed % 5]
    setup["enabled"] = True
    setup["pages"] = draw.randrange(20, 60)
    machine = CacheMachine()
    machine.start(setup)
    starts = [[draw.randrange(2) for _ in range(12)] for _ in range(3)]
    for _ in range(600):
        which = draw.randrange(100)
        namespace = draw.choice(NAMESPACES[:2] if draw.random() < 0.6 else NAMESPACES)
        tokens = draw.choice(starts)[: draw.randrange(1, 13)]
        tokens = tokens + [draw.randrange(2) for _ in range(draw.randrange(6))]
        choices = {"insert": [True, False], "lookup": [True, False], "first": [True, False]}
        options: dict[str, Any] = {
            k: draw.choice(v) for k, v in choices.items() if draw.random() < 0.2
        }
        options["priority"] = draw.randrange(3)
        kind = draw.random()
        if kind < 0.25 and len(machine.running) < 6:
            machine.open(namespace, tokens, options)
        elif kind < 0.4:
            machine.serve(namespace, tokens, options)
        elif kind < 0.43:
            machine.evict_exactly(draw.randrange(1, 5), draw.choice(TENANTS))
        elif kind < 0.44:
            machine.flush(draw.choice([None, namespace]))
        elif kind < 0.46:
            machine.wait(draw.choice([0.1, 1]))
            machine.expire()
        elif kind < 0.47:
            machine.set_quotas(draw.choice([*QUOTAS, IMPOSSIBLE]))
        elif kind < 0.49:
            machine.pin(namespace, tokens)
        elif kind < 0.50:
            machine.yield_pin(draw.choice(TENANTS))
        elif kind < 0.52:
            machine.publish(draw.choice("pq"), ["a", "ab"], draw.choice(starts)[:8], True)
        elif kind < 0.525:
            machine.withdraw(draw.choice("pq"))
        elif machine.running and kind < 0.62:
            machine.generate(which, draw.randrange(2))
        elif machine.running and kind < 0.75:
            machine.compute(which, draw.randrange(1, 9))
        elif machine.running and kind < 0.85:
            machine.prefill(which)
        elif machine.running and kind < 0.9:
            machine.commit(which)
        elif machine.running:
            machine.close(which, draw.random() < 0.8)
        machine.everything_adds_up()
    machine.teardown()
