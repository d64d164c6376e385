"""Floors, caps and the order of those who give up, on random lives of several tenants.

The rules are checked around every operation, against what a plain scan of the trees says.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from ktserve.cache.audit import audit
from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing, divide
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack

SECOND = 1_000_000_000
MODES: list[CacheSharing] = ["shared", "floors", "partitioned"]
TENANTS = ["small", "large", "capped", "undeclared"]
QUOTAS = {
    "small": Quota(weight=1.0),
    "large": Quota(weight=3.0),
    "capped": Quota(weight=2.0, cache_cap=0.25),
}


class Life:
    """Random requests; every change of who holds what is checked."""

    def __init__(self, sharing: CacheSharing, seed: int, page_size: int = 1) -> None:
        self.draw = random.Random(seed)
        self.now = 0
        self.cache = CacheManager(
            PagePool(48), page_size, sharing=sharing, quotas=QUOTAS, clock=lambda: self.now
        )
        self.running: list[tuple[BlockTable, list[int], int]] = []
        self.taken_from_others = self.refused = self.guarded = 0

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.draw.randrange(1, 5 * SECOND)
            self.step()
            self.check()

    def step(self) -> None:
        kind = self.draw.random()
        if kind < 0.3 and len(self.running) < 5:
            self.open(self.draw.choice(TENANTS))
        elif self.running and kind < 0.75:
            self.advance(self.draw.randrange(len(self.running)), self.draw.randrange(1, 9))
        elif self.running:
            table, tokens, written = self.running.pop(self.draw.randrange(len(self.running)))
            self.cache.close(table, pack(tokens[:written]))

    def open(self, tenant: str) -> None:
        page = self.cache.page_size
        # The large tenant's prompts are all new, and others' come again: their hit rates differ.
        variety = 1000 if tenant == "large" else 2
        tokens = [self.draw.randrange(variety) for _ in range(self.draw.randrange(2, 12))]
        tokens = [token for token in tokens for _ in range(page)]
        namespace = ns(tenant, self.draw.choice([None, "s"]))
        table = self.cache.open(namespace, pack(tokens), insert=self.draw.random() < 0.8)
        self.running.append((table, tokens, table.cached_tokens))

    def advance(self, which: int, count: int) -> None:
        table, tokens, written = self.running[which]
        end = min(len(tokens), written + count)
        if self.grow(table, end):
            self.cache.commit(table, pack(tokens[:end]))
            self.running[which] = (table, tokens, end)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Grow ``table``, and check who gave up what for it."""
        cache, taker = self.cache, table.account
        before = {account.tenant: account.resident for account in cache.accounts}
        above = {a.tenant: max(0, a.held - a.share.floor) for a in cache.accounts}
        missing = max(0, cache.pages_for(tokens) - table.length)
        shortfall = max(missing - cache.pool.free, taker.held + missing - taker.share.cap)
        expected = max(0, shortfall) if missing else 0
        grown = cache.grow(table, tokens)
        lost = {a.tenant: before[a.tenant] - a.resident for a in cache.accounts}
        for tenant, pages in lost.items():
            if tenant != taker.tenant:
                assert pages <= above[tenant], "a page below a floor went to another tenant"
                self.taken_from_others += pages
                self.guarded += above[tenant] == 0 and before[tenant] > 0
        assert sum(lost.values()) == (expected if grown else 0), "no more than needed"
        self.refused += not grown
        return grown

    def check(self) -> None:
        audit(self.cache, [table for table, _, _ in self.running])
        for account in self.cache.accounts:
            assert account.held <= account.share.cap, "a tenant holds more than its cap"
        assert self.cache.balanced()

    def close_all(self) -> None:
        while self.running:
            table, tokens, written = self.running.pop()
            self.cache.close(table, pack(tokens[:written]))
            audit(self.cache, [table for table, _, _ in self.running])


def ns(tenant: str, salt: str | None = None) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)


def fill(cache: CacheManager, tenant: str, pages: int, first: int = 0) -> None:
    """Have ``tenant`` hold ``pages`` pages that no lease covers, each a prompt of its own."""
    for number in range(pages):
        prompt = pack([first + number] * cache.page_size)
        table = cache.open(ns(tenant), prompt)
        assert cache.grow(table, cache.page_size)
        cache.close(table, prompt)


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sharing", MODES)
def test_nobody_at_its_floor_gives_and_nobody_exceeds_its_cap(
    sharing: CacheSharing, seed: int, page_size: int
) -> None:
    life = Life(sharing, seed, page_size)
    life.live(300)
    # The traces put the rules to the test: pages move where they may, and some may not.
    assert (life.taken_from_others > 20) == (sharing != "partitioned")
    if sharing != "shared":
        assert life.guarded > 20
        assert life.refused > 0


def weight_of_age(cache: CacheManager, tenant: str, now: int) -> float | None:
    """``age / (0.005 + hit rate)`` of the tenant's oldest free leaf; None below its floor."""
    account = cache.accounts.of(tenant)
    leaves = [
        node.last_used
        for tree in account.trees.values()
        for node in tree.walk()
        if not node.locks and not node.children
    ]
    if account.held <= account.share.floor or not leaves:
        return None
    return (now - min(leaves)) / (0.005 + account.hit_rate)


@pytest.mark.parametrize("seed", range(4))
def test_the_next_page_is_that_of_the_greatest_age_for_its_hit_rate(seed: int) -> None:
    life = Life("floors", seed)
    cache = life.cache
    givers: dict[str, int] = {}
    not_the_oldest = 0
    for _ in range(400):
        life.now += life.draw.randrange(1, 5 * SECOND)
        life.step()
        table = cache.open(
            ns(life.draw.choice(TENANTS[:3]), "probe"), pack([1, 2, 3]), insert=False
        )
        own = table.account.held >= table.account.share.cap
        if cache.pool.free == 0 and not own and min(cache.rooms(table.namespace.tenant)) > 0:
            weights = {name: weight_of_age(cache, name, life.now) for name in TENANTS}
            above = {name: weight for name, weight in weights.items() if weight is not None}
            expected = max(above, key=above.__getitem__) if above else table.namespace.tenant
            before = {name: cache.accounts.of(name).evicted for name in TENANTS}
            assert cache.grow(table, table.length + 1)
            lost = {name: cache.accounts.of(name).evicted - before[name] for name in TENANTS}
            assert {name for name, pages in lost.items() if pages} == {expected}
            givers[expected] = givers.get(expected, 0) + 1
            ages = {n: w * (0.005 + cache.accounts.of(n).hit_rate) for n, w in above.items()}
            not_the_oldest += bool(ages) and expected != max(ages, key=ages.__getitem__)
        cache.close(table, b"")
    life.close_all()
    assert len(givers) >= 3
    assert not_the_oldest > 5  # the hit rate decided


quotas = st.dictionaries(
    st.sampled_from(TENANTS),
    st.builds(
        Quota,
        weight=st.floats(0.1, 10.0),
        cache_floor=st.none() | st.floats(0.0, 0.3),
        cache_cap=st.none() | st.floats(0.05, 1.0),
    ),
    min_size=1,
)


@pytest.mark.parametrize("sharing", MODES)
@settings(deadline=None, max_examples=60)
@given(pages=st.integers(1, 400), quotas=quotas)
def test_shares_fit_the_pool(
    sharing: CacheSharing, pages: int, quotas: Mapping[str, Quota]
) -> None:
    try:
        shares = divide(sharing, pages, quotas)
    except ValueError:
        reject()  # more floors than pages, or a part of no page
    floors = sum(share.floor for share in shares.values())
    assert floors <= pages
    for name, share in shares.items():
        cap = quotas[name].cache_cap
        assert 0 <= share.floor <= share.cap <= (pages if cap is None else int(cap * pages))
        assert share.capacity == min(share.cap, pages - floors + share.floor)
        assert share.cap >= 1
        if sharing == "shared":
            assert share.floor == 0
        elif sharing == "partitioned":
            assert share.floor == share.cap == share.capacity


@pytest.mark.parametrize("sharing", MODES)
def test_a_sequence_gets_its_capacity_while_all_others_hold_on_to_their_floors(
    sharing: CacheSharing,
) -> None:
    for tenant in QUOTAS:
        cache = CacheManager(PagePool(50), 2, sharing=sharing, quotas=QUOTAS)
        others = [name for name in QUOTAS if name != tenant]
        for number, name in enumerate(others):
            fill(cache, name, cache.accounts.of(name).share.floor, first=1000 * number)
        capacity = cache.capacity(tenant)
        table = cache.open(ns(tenant), pack([9] * 200))
        assert not cache.grow(table, 2 * capacity + 1)
        assert cache.grow(table, 2 * capacity)
        audit(cache, [table])
        for name in others:
            account = cache.accounts.of(name)
            assert account.resident == account.share.floor
        cache.close(table, b"")
        audit(cache, [])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sharing", MODES)
def test_new_quotas_hold_at_once_or_as_sequences_close(sharing: CacheSharing, seed: int) -> None:
    life = Life(sharing, seed)
    trimmed = waited = 0
    for _ in range(60):
        for _ in range(5):
            life.now += SECOND
            life.step()
        names = life.draw.sample(TENANTS[:3], life.draw.randrange(1, 4))
        quotas = {
            name: Quota(
                weight=life.draw.uniform(0.5, 4),
                cache_floor=life.draw.choice([None, life.draw.uniform(0.05, 0.3)]),
                cache_cap=life.draw.choice([None, life.draw.uniform(0.31, 0.8)]),
            )
            for name in names
        }
        before = {account.tenant: account.resident for account in life.cache.accounts}
        over = {
            account.tenant: account.held
            - (shares[account.tenant].cap if account.tenant in shares else undeclared)
            for shares, undeclared in [
                (divide(sharing, 48, quotas), 0 if sharing == "partitioned" else 48)
            ]
            for account in life.cache.accounts
        }
        evictable = {account.tenant: account.evictable for account in life.cache.accounts}
        life.cache.set_quotas(quotas)
        audit(life.cache, [table for table, _, _ in life.running])
        for account in life.cache.accounts:
            name = account.tenant
            lost = before[name] - account.resident
            assert lost == max(0, min(over[name], evictable[name]))
            trimmed += lost
            waited += account.held > account.share.cap
    life.close_all()
    for account in life.cache.accounts:
        assert account.held <= account.share.cap
    if sharing == "partitioned":
        assert trimmed > 0
        assert waited > 0
