"""Pins: prefixes that an operator keeps from eviction, within a budget."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from clocks import TickingClock

from ktserve.cache.audit import audit
from ktserve.cache.kept import CacheError
from ktserve.cache.manager import CacheManager
from ktserve.cache.policies import EvictionPolicy
from ktserve.cache.pool import PagePool
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack


def manager(
    pages: int = 20,
    *,
    budget: float = 0.4,
    page_size: int = 1,
    sharing: CacheSharing = "floors",
    policy: EvictionPolicy = "lru",
    quotas: Mapping[str, Quota] | None = None,
) -> CacheManager:
    return CacheManager(
        PagePool(pages),
        page_size,
        sharing=sharing,
        policy=policy,
        quotas=quotas,
        pin_budget=budget,
        clock=TickingClock(),
    )


def ns(tenant: str = "t", salt: str | None = None) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)


def serve(cache: CacheManager, tokens: list[int], tenant: str = "t") -> BlockTable:
    prompt = pack(tokens)
    table = cache.open(ns(tenant), prompt)
    assert cache.grow(table, len(tokens))
    cache.close(table, prompt)
    audit(cache, [])
    return table


def take_all(cache: CacheManager, tenant: str = "t") -> None:
    """A request of ``tenant`` that takes whatever it can get, and keeps nothing."""
    table = cache.open(ns(tenant, "taker"), pack([1]), insert=False)
    room = min(cache.rooms(tenant))
    assert cache.grow(table, room * cache.page_size)
    assert not cache.grow(table, room * cache.page_size + 1)
    audit(cache, [table])
    cache.close(table, b"")
    audit(cache, [])


def found(cache: CacheManager, tokens: list[int], tenant: str = "t") -> int:
    return cache.peek(ns(tenant), pack([*tokens, 999]))[0]


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "priority"])
def test_a_pinned_prefix_is_never_evicted(policy: EvictionPolicy) -> None:
    cache = manager(policy=policy)
    serve(cache, [1, 2, 3, 4, 5])
    serve(cache, [7, 8])
    pin = cache.pin(ns(), pack([1, 2, 3]))
    assert (pin.pages, list(cache.kept.pins.values())) == (3, [pin])
    audit(cache, [])
    take_all(cache)
    take_all(cache, "other")
    assert (found(cache, [1, 2, 3, 4, 5]), found(cache, [7, 8])) == (3, 0)
    # Without the pin it goes like everything else.
    cache.unpin(pin.id)
    audit(cache, [])
    assert not cache.kept.pins.values()
    take_all(cache)
    assert found(cache, [1, 2, 3]) == 0


def test_neither_flush_nor_limits_take_pinned_pages() -> None:
    cache = manager()
    serve(cache, [1, 2, 3, 4])
    cache.pin(ns(), pack([1, 2]))
    assert cache.flush() == 2
    assert cache.flush(ns()) == 0
    audit(cache, [])
    cache.set_quotas({"t": Quota(cache_cap=0.05)})
    audit(cache, [])
    assert found(cache, [1, 2, 3, 4]) == 2


def test_a_pin_covers_what_is_cached_of_its_prefix_in_whole_pages() -> None:
    cache = manager(page_size=4, budget=0.5)
    serve(cache, list(range(12)))
    assert cache.pin(ns(), pack([*range(10), 99])).pages == 2
    assert cache.pin(ns(), pack([*range(12), 50, 51, 52, 53])).pages == 3
    audit(cache, [])
    take_all(cache)
    assert found(cache, list(range(12))) == 3


def test_what_is_not_cached_cannot_be_pinned() -> None:
    cache = manager(page_size=4)
    serve(cache, list(range(12)))
    trees = list(cache.forest.trees())
    for namespace, tokens in [
        (ns("other"), list(range(12))),  # no tree
        (ns(), [5, 6, 7, 8]),  # another prefix
        (ns(), [0, 1, 2]),  # no page of it
        (ns(), []),
    ]:
        with pytest.raises(
            CacheError, match="nothing of this prefix is cached in its namespace; send it once"
        ):
            cache.pin(namespace, pack(tokens))
    audit(cache, [])
    assert list(cache.forest.trees()) == trees
    assert not cache.kept.pins.values()


def test_pins_beyond_the_budget_are_refused() -> None:
    cache = manager(budget=0.25, page_size=2)  # 5 pages
    serve(cache, list(range(12)))
    first = cache.pin(ns(), pack(range(6)))
    with pytest.raises(
        CacheError, match=r"the pin needs 6 tokens; of the 10 that --pin-budget allows 6 are taken"
    ):
        cache.pin(ns(), pack(range(6)))
    assert list(cache.kept.pins.values()) == [first]
    audit(cache, [])
    second = cache.pin(ns(), pack(range(4)))
    assert second.pages == 2
    with pytest.raises(CacheError, match="raise it, or remove a pin"):
        cache.pin(ns(), pack(range(2)))
    cache.unpin(first.id)
    assert cache.pin(ns(), pack(range(6))).pages == 3
    audit(cache, [])


def test_without_a_budget_nothing_can_be_pinned() -> None:
    cache = manager(budget=0.0)
    serve(cache, [1, 2])
    with pytest.raises(CacheError, match="--pin-budget"):
        cache.pin(ns(), pack([1]))
    audit(cache, [])


def test_a_pin_is_removed_once() -> None:
    cache = manager()
    serve(cache, [1, 2])
    one, two = cache.pin(ns(), pack([1, 2])), cache.pin(ns(), pack([1, 2]))
    assert one.id != two.id
    cache.unpin(one.id)
    audit(cache, [])
    with pytest.raises(CacheError, match=f"there is no pin {one.id}"):
        cache.unpin(one.id)
    audit(cache, [])
    # The second pin of the same prefix still keeps it.
    take_all(cache)
    assert found(cache, [1, 2]) == 2
    cache.unpin(two.id)
    assert cache.pin(ns(), pack([1, 2])).id not in {one.id, two.id}
    audit(cache, [])


def test_a_pin_is_no_lookup_and_no_hit() -> None:
    cache = manager(policy="lfu")
    serve(cache, [1, 2])
    account = cache.accounts.of("t")
    before = (account.lookups, account.hits, account.hit_rate)
    cache.unpin(cache.pin(ns(), pack([1, 2])).id)
    assert (account.lookups, account.hits, account.hit_rate) == before
    assert [node.hits for tree in account.trees.values() for node in tree.walk()] == [0]


def test_a_pinned_namespace_stays_when_all_its_other_pages_went() -> None:
    cache = manager()
    serve(cache, [1, 2, 3])
    pin = cache.pin(ns(), pack([1]))
    take_all(cache)
    cache.flush()
    tree = cache.forest.tree(ns())
    assert tree is not None
    assert (tree.resident, tree.leases) == (1, 1)
    cache.unpin(pin.id)
    cache.flush()
    audit(cache, [])
    assert cache.forest.tree(ns()) is None


def test_requests_go_on_from_a_pinned_prefix() -> None:
    cache = manager()
    serve(cache, [1, 2, 3])
    cache.pin(ns(), pack([1, 2, 3]))
    assert serve(cache, [1, 2, 3, 4, 5]).cached_tokens == 3
    assert serve(cache, [1, 2, 3, 4, 6]).cached_tokens == 4
    take_all(cache)
    assert found(cache, [1, 2, 3, 4, 5]) == 3


# Giving way.


def test_the_oldest_pin_gives_way_first() -> None:
    cache = manager()
    serve(cache, [1])
    serve(cache, [2])
    serve(cache, [3])
    pins = [cache.pin(ns(), pack([token])) for token in (2, 1, 3)]
    serve(cache, [2, 9])  # a use makes it no younger
    for number in range(3):
        assert list(cache.kept.pins.values()) == pins[number:]
        assert cache.yield_pin("t", own=False)
        audit(cache, [])
    assert not cache.yield_pin("t", own=False)
    with pytest.raises(CacheError, match="gave way to a request"):
        cache.unpin(pins[0].id)
    take_all(cache)
    assert found(cache, [2]) == 0


def test_a_pin_gives_way_to_who_could_use_its_pages() -> None:
    quotas = {"a": Quota(cache_floor=0.2), "b": Quota(cache_floor=0.2)}
    cache = manager(quotas=quotas)
    serve(cache, [1, 2, 3, 4], "a")
    mine = cache.pin(ns("a"), pack([1, 2]))
    serve(cache, [1], "b")
    # All of a's pages are below its floor: b has nothing of a pin there.
    assert not cache.yield_pin("b", own=False)
    assert list(cache.kept.pins.values()) == [mine]
    serve(cache, [5, 6, 7], "a")
    assert cache.yield_pin("b", own=False)
    assert not cache.kept.pins.values()
    audit(cache, [])


def test_the_own_pin_gives_way_although_it_is_below_the_floor() -> None:
    cache = manager(quotas={"a": Quota(cache_floor=0.5), "b": Quota(cache_floor=0.5)})
    serve(cache, [1, 2], "b")
    serve(cache, [1, 2], "a")
    other, own = cache.pin(ns("b"), pack([1])), cache.pin(ns("a"), pack([1]))
    assert cache.yield_pin("a", own=False)
    assert list(cache.kept.pins.values()) == [other]
    assert own not in cache.kept.pins.values()
    audit(cache, [])


def test_in_a_partition_a_pin_gives_way_to_its_own_tenant_alone() -> None:
    cache = manager(sharing="partitioned", quotas={"a": Quota(), "b": Quota()})
    serve(cache, list(range(10)), "a")
    pin = cache.pin(ns("a"), pack(range(4)))
    assert not cache.yield_pin("b", own=False)
    assert list(cache.kept.pins.values()) == [pin]
    assert cache.yield_pin("a", own=False)
    audit(cache, [])


def test_a_tenant_at_its_cap_moves_no_pin_of_another() -> None:
    cache = manager(sharing="shared", quotas={"a": Quota(cache_cap=0.2), "b": Quota()})
    serve(cache, [1, 2, 3], "b")
    pin = cache.pin(ns("b"), pack([1]))
    table = cache.open(ns("a"), pack([1]), insert=False)
    assert cache.grow(table, 4)
    assert not cache.yield_pin("a", own=False)
    assert list(cache.kept.pins.values()) == [pin]
    cache.close(table, b"")
    assert cache.yield_pin("a", own=False)
    audit(cache, [])


def test_pages_of_a_pin_that_gave_way_can_be_had() -> None:
    cache = manager(pages=10)
    serve(cache, [1, 2, 3, 4])
    cache.pin(ns(), pack([1, 2, 3, 4]))
    table = cache.open(ns(), pack(range(50, 60)), insert=False)
    assert not cache.grow(table, 10)
    assert cache.yield_pin("t", own=False)
    assert cache.grow(table, 10)
    audit(cache, [table])
    cache.close(table, b"")
    audit(cache, [])
    assert cache.pool.free == cache.pool.total


def test_behind_a_public_prefix_a_pin_keeps_what_is_the_namespaces_own() -> None:
    cache = CacheManager(
        PagePool(60), 1, quotas={"t": Quota()}, pin_budget=0.5, reserve_public=True
    )
    prefix = cache.publish("house", ["t"], pack(range(10)))
    table = cache.open(prefix.namespace, prefix.tokens)
    assert cache.grow(table, 10)
    cache.close(table, prefix.tokens)
    assert cache.hold(prefix)
    with pytest.raises(CacheError, match="in its namespace"):
        cache.pin(ns(), pack(range(10)))
    tokens = [*range(10), 50, 51, 52]
    serve(cache, tokens)
    pin = cache.pin(ns(), pack(tokens))
    assert pin.pages == 3
    audit(cache, [])
    for first in range(100, 200, 10):
        serve(cache, list(range(first, first + 10)))
    assert cache.peek(ns(), pack([*tokens, 99]))[0] == 13
    cache.repair()
    cache.unpin(pin.id)
    audit(cache, [])
