"""Who gives up a page under each way of sharing the pool, scenario by scenario."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from clocks import HandClock

from ktserve.cache.audit import audit
from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack

MODES: list[CacheSharing] = ["shared", "floors", "partitioned"]
EQUAL = {"a": Quota(), "b": Quota()}


def manager(
    sharing: CacheSharing,
    pages: int = 20,
    quotas: Mapping[str, Quota] = EQUAL,
    clock: HandClock | None = None,
) -> CacheManager:
    return CacheManager(
        PagePool(pages), 1, sharing=sharing, quotas=quotas, clock=clock or HandClock()
    )


def ns(tenant: str, salt: str | None = None) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)


def serve(cache: CacheManager, tenant: str, first: int, pages: int = 1) -> int:
    """A request of ``pages`` tokens that no other begins with; tokens that it found."""
    prompt = pack(range(first, first + pages))
    table = cache.open(ns(tenant), prompt)
    assert cache.grow(table, pages)
    cache.close(table, prompt)
    audit(cache, [])
    return table.cached_tokens


def start(cache: CacheManager, tenant: str, pages: int, first: int = 5000) -> BlockTable:
    """A sequence that runs and holds ``pages`` pages."""
    table = cache.open(ns(tenant), pack(range(first, first + pages)))
    assert cache.grow(table, pages)
    return table


def cached(cache: CacheManager, tenant: str, first: int, pages: int = 1) -> int:
    """Pages of the prompt from `serve` that are resident."""
    prompt = pack([*range(first, first + pages), 9999])
    return cache.peek(ns(tenant), prompt)[0]


def resident(cache: CacheManager) -> dict[str, int]:
    return {account.tenant: account.resident for account in cache.accounts}


def test_shared_takes_the_oldest_page_whoever_it_is_of() -> None:
    cache = manager("shared")
    serve(cache, "a", 100)
    for number in range(19):
        serve(cache, "b", 200 + number)
    serve(cache, "b", 300)
    assert resident(cache) == {"a": 0, "b": 20}
    assert cache.accounts.of("a").evicted_by == {"b": 1}
    assert cache.accounts.of("b").caused == 1
    # The other way round: the oldest is the taker's own.
    serve(cache, "b", 301)
    assert cache.accounts.of("b").evicted_by == {"b": 1}


def test_a_scanner_leaves_a_neighbour_its_floor() -> None:
    cache = manager("floors")
    for number in range(8):
        serve(cache, "a", 100 + number)
    for number in range(100):
        serve(cache, "b", 200 + number)
    # Equal weights over 20 pages: floors of 5.
    assert resident(cache) == {"a": 5, "b": 15}
    assert [cached(cache, "a", 100 + number) for number in range(8)] == [0] * 3 + [1] * 5


def test_without_floors_the_same_scanner_takes_everything() -> None:
    cache = manager("shared")
    for number in range(8):
        serve(cache, "a", 100 + number)
    for number in range(100):
        serve(cache, "b", 200 + number)
    assert resident(cache) == {"a": 0, "b": 20}


def test_a_tenant_below_its_floor_takes_from_one_above() -> None:
    cache = manager("floors")
    for number in range(20):
        serve(cache, "b", 200 + number)
    for number in range(5):
        serve(cache, "a", 100 + number)
    assert resident(cache) == {"b": 15, "a": 5}
    assert cache.accounts.of("b").evicted_by == {"a": 5}
    assert cache.accounts.of("a").evicted == 0


def test_where_nobody_is_above_its_floor_a_tenant_gives_its_own() -> None:
    quotas = {"a": Quota(cache_floor=0.5), "b": Quota(cache_floor=0.5)}
    cache = manager("floors", quotas=quotas)
    for number in range(10):
        serve(cache, "a", 100 + number)
    for number in range(10):
        serve(cache, "b", 200 + number)
    serve(cache, "b", 300, pages=3)
    assert resident(cache) == {"a": 10, "b": 10}
    assert cache.accounts.of("b").evicted_by == {"b": 3}


def test_floors_spare_the_older_pages_of_a_tenant_that_hits() -> None:
    def first_to_give(a_hits: bool) -> set[str]:
        clock = HandClock()
        cache = manager("floors", quotas={n: Quota(cache_floor=0.1) for n in "abc"}, clock=clock)
        if a_hits:
            for _ in range(40):
                serve(cache, "a", 100, pages=2)
        for tenant, first in (("a", 400), ("b", 500)):
            clock.seconds += 10
            for number in range(9):
                serve(cache, tenant, first + number)
        clock.seconds += 10
        serve(cache, "b", 600, pages=cache.pool.free + 1)
        return {one.tenant for one in cache.accounts if one.evicted}

    # Its pages are older, and it hits nothing: they go. The same pages stay if it hits.
    assert first_to_give(a_hits=False) == {"a"}
    assert first_to_give(a_hits=True) == {"b"}


def test_a_partition_gives_and_takes_nothing() -> None:
    cache = manager("partitioned")
    serve(cache, "a", 100, pages=4)
    for number in range(30):
        serve(cache, "b", 200 + number)
    assert resident(cache) == {"a": 4, "b": 10}
    assert cache.pool.free == 6
    table = cache.open(ns("b"), pack(range(11)))
    assert not cache.grow(table, 11)
    assert cache.grow(table, 10)
    cache.close(table, b"")
    audit(cache, [])
    assert cached(cache, "a", 100, pages=4) == 4


@pytest.mark.parametrize("sharing", MODES)
def test_a_cap_holds_with_private_pages_and_in_every_mode(sharing: CacheSharing) -> None:
    cache = manager(sharing, quotas={"a": Quota(cache_cap=0.3), "b": Quota()})
    serve(cache, "a", 100, pages=4)
    table = cache.open(ns("a"), pack(range(200, 240)))
    assert not cache.grow(table, 7)
    assert cache.grow(table, 3)
    account = cache.accounts.of("a")
    assert (account.resident, account.private) == (3, 3)
    assert account.evicted_by == {"a": 1}
    assert cache.grow(table, 6)
    assert not cache.grow(table, 7)
    assert (account.resident, account.private) == (0, 6)
    audit(cache, [table])
    # The pool was never short.
    assert cache.pool.free == 14
    cache.close(table, b"")
    audit(cache, [])


def test_pages_for_a_cap_come_from_the_tenant_itself_first() -> None:
    """At its cap a request takes its own pages, and others' only for what is still missing."""
    cache = manager("shared", quotas={"a": Quota(cache_cap=0.5), "b": Quota()})
    serve(cache, "b", 500, pages=8)
    for number in range(8):
        serve(cache, "a", 100 + number)
    # 4 are free; 5 wanted, 2 to go on from the cap: 3 come from a, and none from b.
    serve(cache, "a", 300, pages=5)
    assert resident(cache) == {"b": 8, "a": 10}
    assert cache.accounts.of("a").evicted_by == {"a": 3}


def test_a_refused_growth_changes_nothing() -> None:
    cache = manager("floors")
    serve(cache, "a", 100, pages=5)
    running = start(cache, "b", 10)
    table = cache.open(ns("b"), pack(range(200, 207)))
    before = resident(cache)
    # 5 are free and a's 5 are its floor.
    assert not cache.grow(table, 6)
    assert (resident(cache), cache.pool.free, table.length) == (before, 5, 0)
    audit(cache, [running, table])
    assert cache.grow(table, 5)
    cache.close(table, b"")
    cache.close(running, b"")
    audit(cache, [])


def test_who_is_not_declared_keeps_nothing_from_others() -> None:
    cache = manager("floors")
    for number in range(20):
        serve(cache, "stranger", 100 + number)
    for number in range(20):
        serve(cache, "a", 200 + number)
    assert resident(cache) == {"stranger": 0, "a": 20}


def test_who_is_not_declared_has_no_partition() -> None:
    cache = manager("partitioned")
    table = cache.open(ns("stranger"), pack([1]))
    assert not cache.grow(table, 1)
    assert min(cache.rooms("stranger")) == cache.capacity("stranger") == 0
    cache.close(table, b"")
    audit(cache, [])


@pytest.mark.parametrize("sharing", MODES)
def test_room_is_what_can_be_had_and_not_a_page_more(sharing: CacheSharing) -> None:
    cache = manager(sharing, quotas={"a": Quota(cache_cap=0.6), "b": Quota()})
    serve(cache, "b", 500, pages=7)
    serve(cache, "a", 100, pages=3)
    running = start(cache, "b", 2)
    for tenant in ("a", "b"):
        room = min(cache.rooms(tenant))
        table = cache.open(ns(tenant), pack(range(300, 350)))
        assert not cache.grow(table, room + 1)
        assert cache.grow(table, room)
        audit(cache, [running, table])
        cache.close(table, b"")
    cache.close(running, b"")
    audit(cache, [])


def test_sequences_fit_together_when_floors_and_caps_allow_it() -> None:
    cache = manager("floors", quotas={"a": Quota(cache_cap=0.5), "b": Quota()})
    # Floors of 5 each.
    assert cache.fit_together({"a": 10, "b": 10})
    assert not cache.fit_together({"a": 11})
    assert cache.fit_together({"b": 15})
    assert not cache.fit_together({"b": 16})
    assert cache.fit_together({"a": 5, "b": 15})
    assert not cache.fit_together({"a": 6, "b": 15})


def test_a_raised_floor_protects_from_now_on() -> None:
    cache = manager("floors")
    for number in range(15):
        serve(cache, "a", 100 + number)
    cache.set_quotas({"a": Quota(cache_floor=0.6), "b": Quota()})
    audit(cache, [])
    for number in range(40):
        serve(cache, "b", 200 + number)
    assert resident(cache) == {"a": 12, "b": 8}


def test_a_lowered_floor_protects_no_longer() -> None:
    cache = manager("floors", quotas={"a": Quota(cache_floor=0.6), "b": Quota()})
    for number in range(12):
        serve(cache, "a", 100 + number)
    for number in range(40):
        serve(cache, "b", 200 + number)
    assert resident(cache) == {"a": 12, "b": 8}
    cache.set_quotas({"a": Quota(cache_floor=0.1), "b": Quota()})
    assert resident(cache) == {"a": 12, "b": 8}  # nothing goes before somebody needs it
    for number in range(40):
        serve(cache, "b", 300 + number)
    assert resident(cache) == {"a": 2, "b": 18}


def test_a_lowered_cap_trims_the_oldest_at_once() -> None:
    cache = manager("floors")
    for number in range(10):
        serve(cache, "a", 100 + number)
    cache.set_quotas({"a": Quota(cache_cap=0.2), "b": Quota()})
    audit(cache, [])
    assert [cached(cache, "a", 100 + number) for number in range(10)] == [0] * 6 + [1] * 4
    assert cache.accounts.of("a").evicted_by == {"": 6}
    assert cache.pool.free == 16


def test_a_lowered_cap_reaches_running_sequences_as_they_close() -> None:
    cache = manager("floors")
    serve(cache, "a", 100, pages=2)
    first, second = start(cache, "a", 6), start(cache, "a", 5, first=6000)
    audit(cache, [first, second])
    cache.set_quotas({"a": Quota(cache_cap=0.2), "b": Quota()})
    account = cache.accounts.of("a")
    assert (account.resident, account.private) == (0, 11)
    assert not cache.grow(first, 7)
    cache.close(first, pack(range(5000, 5006)))
    audit(cache, [second])
    assert account.held == 5  # its six went at once: the other one still holds more than the cap
    cache.close(second, pack(range(6000, 6005)))
    audit(cache, [])
    assert account.held == account.resident == 4


def test_a_lowered_cap_reaches_pinned_pages_when_they_come_free() -> None:
    cache = manager("floors")
    serve(cache, "a", 100, pages=2)
    pin = cache.pin(ns("a"), pack([100, 101]))
    cache.set_quotas({"a": Quota(cache_cap=0.05), "b": Quota()})
    account = cache.accounts.of("a")
    assert (account.held, account.share.cap) == (2, 1)
    cache.unpin(pin.id)
    audit(cache, [])
    assert account.held <= account.share.cap


@pytest.mark.parametrize("sharing", MODES[1:])
def test_quotas_that_cannot_be_had_change_nothing(sharing: CacheSharing) -> None:
    cache = manager(sharing)
    serve(cache, "a", 100, pages=4)
    shares = {account.tenant: account.share for account in cache.accounts}
    with pytest.raises(ValueError, match="cache_floor"):
        cache.set_quotas({"a": Quota(cache_floor=0.7), "b": Quota(cache_floor=0.7)})
    with pytest.raises(ValueError, match="tenant b gets none"):
        cache.set_quotas({"a": Quota(cache_cap=0.05), "b": Quota(cache_cap=0.01)})
    audit(cache, [])
    assert {account.tenant: account.share for account in cache.accounts} == shares
    assert cache.accounts.of("a").quota == Quota()
    assert cached(cache, "a", 100, pages=4) == 4
    # Who was not seen before gets what the old quotas say, too.
    assert cache.accounts.of("b").share == shares["a"]
    assert cache.accounts.of("b").quota == Quota()
