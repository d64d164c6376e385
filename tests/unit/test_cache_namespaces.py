"""Namespaces: their counters, how they are forgotten, and that they leave nothing behind."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Mapping

import pytest
from clocks import HandClock

from ktserve.cache.audit import audit
from ktserve.cache.ghosts import GHOSTS
from ktserve.cache.manager import CacheManager
from ktserve.cache.node import Tree
from ktserve.cache.pool import PagePool
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack

SECOND = 1_000_000_000


def manager(
    pages: int = 20,
    *,
    clock: HandClock | None = None,
    quotas: Mapping[str, Quota] | None = None,
    max_namespaces: int = 10_000,
    max_nodes: int | None = None,
    page_size: int = 1,
) -> CacheManager:
    return CacheManager(
        PagePool(pages),
        page_size,
        sharing="shared",
        quotas=quotas,
        max_namespaces=max_namespaces,
        max_nodes=max_nodes,
        pin_budget=0.5,
        clock=clock or HandClock(),
    )


def ns(salt: str | None = None, tenant: str = "t") -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)


def serve(cache: CacheManager, namespace: Namespace, tokens: list[int]) -> BlockTable:
    prompt = pack(tokens)
    table = cache.open(namespace, prompt)
    assert cache.grow(table, len(tokens))
    cache.close(table, prompt)
    return table


def tree(cache: CacheManager, salt: str | None = None, tenant: str = "t") -> Tree:
    found = cache.forest.tree(ns(salt, tenant))
    assert found is not None
    return found


def salts(cache: CacheManager, tenant: str = "t") -> list[str | None]:
    return [one.cache_salt for one in cache.accounts.of(tenant).trees]


def due(cache: CacheManager) -> int | None:
    return cache.next_expiry


# Counters.


def test_lookups_and_hits_are_counted_for_the_namespace_and_its_tenant_alone() -> None:
    cache = manager()
    serve(cache, ns("one"), [1, 2, 3, 4])
    serve(cache, ns("one"), [1, 2, 3, 9])
    serve(cache, ns("two"), [1, 2, 3, 4])
    serve(cache, ns("one", "other"), [1, 2, 3, 4])
    audit(cache, [])
    counts = {
        one.namespace: (one.lookups, one.hits, one.hit_tokens, one.prompt_tokens)
        for one in cache.forest.trees()
    }
    assert counts == {
        ns("one"): (2, 1, 3, 8),
        ns("two"): (1, 0, 0, 4),
        ns("one", "other"): (1, 0, 0, 4),
    }
    account = cache.accounts.of("t")
    assert (account.lookups, account.hits, account.hit_tokens) == (3, 1, 3)
    # One of its three requests found three of four tokens, and the last of them nothing.
    assert account.hit_rate == pytest.approx(0.05 * 0.75 * 0.95)


def test_an_eviction_counts_for_who_suffers_and_for_who_causes_it() -> None:
    cache = manager()
    serve(cache, ns("old"), list(range(15)))
    serve(cache, ns("own"), list(range(5)))
    serve(cache, ns("taker"), list(range(8)))
    assert (tree(cache, "old").evicted, tree(cache, "old").caused) == (8, 0)
    assert (tree(cache, "own").evicted, tree(cache, "own").caused) == (0, 0)
    assert (tree(cache, "taker").evicted, tree(cache, "taker").caused) == (0, 8)
    serve(cache, ns("taker", "other"), list(range(3)))
    assert tree(cache, "old").evicted == 11
    assert tree(cache, "taker", "other").caused == 3
    account = cache.accounts.of("t")
    assert (account.evicted, account.caused) == (11, 8)
    assert account.evicted_by == {"t": 8, "other": 3}
    audit(cache, [])


# Flush.


def test_flush_forgets_one_namespace_and_no_other() -> None:
    cache = manager()
    for salt in ("one", "two"):
        serve(cache, ns(salt), [1, 2, 3])
    serve(cache, ns("one", "other"), [1, 2, 3])
    assert cache.flush(ns("one")) == 3
    audit(cache, [])
    assert [one.namespace for one in cache.forest.trees()] == [ns("two"), ns("one", "other")]
    assert cache.flush(ns("one")) == 0
    assert cache.accounts.of("t").evicted_by == {"": 3}


def test_flush_forgets_everything_but_what_runs() -> None:
    cache = manager()
    serve(cache, ns("one"), [1, 2, 3])
    serve(cache, ns("two"), [1, 2, 3, 4])
    table = cache.open(ns("two"), pack([1, 2, 9]))
    assert cache.flush() == 3 + 2
    audit(cache, [table])
    assert cache.peek(ns("two"), pack([1, 2, 3, 4, 5]))[0] == 2
    cache.close(table, b"")
    assert cache.flush() == 2
    audit(cache, [])
    assert cache.pool.free == cache.pool.total


# Time to live.


def aging(ttl: float | None = 10.0) -> tuple[CacheManager, HandClock]:
    clock = HandClock()
    return manager(clock=clock, quotas={"t": Quota(cache_ttl=ttl), "other": Quota()}), clock


def test_a_namespace_expires_after_lying_unused() -> None:
    cache, clock = aging()
    serve(cache, ns("one"), [1, 2, 3])
    serve(cache, ns("one", "other"), [1, 2])
    assert due(cache) == pytest.approx(10 * SECOND, abs=1000)
    clock.seconds = 9.9
    assert cache.expire() == 0
    clock.seconds = 10.1
    assert due(cache) == 0
    assert cache.expire() == 3
    audit(cache, [])
    assert [one.namespace for one in cache.forest.trees()] == [ns("one", "other")]
    assert due(cache) is None
    assert cache.expire() == 0
    assert cache.accounts.of("t").evicted_by == {"": 3}


def test_a_use_renews_it() -> None:
    cache, clock = aging()
    serve(cache, ns("used"), [1, 2, 3])
    serve(cache, ns("unused"), [1, 2])
    clock.seconds = 6
    serve(cache, ns("used"), [1, 2, 3])
    clock.seconds = 12
    assert cache.expire() == 2
    assert salts(cache) == ["used"]
    assert due(cache) == pytest.approx(4 * SECOND, abs=1000)
    clock.seconds = 16.1
    assert cache.expire() == 3
    audit(cache, [])


def test_a_look_without_a_lease_renews_nothing() -> None:
    cache, clock = aging()
    serve(cache, ns(), [1, 2, 3])
    clock.seconds = 9
    cache.peek(ns(), pack([1, 2, 3]))
    clock.seconds = 10.1
    assert cache.expire() == 3


def test_a_running_sequence_keeps_its_namespace() -> None:
    cache, clock = aging()
    serve(cache, ns(), [1, 2, 3])
    table = cache.open(ns(), pack([1, 2, 9]))
    clock.seconds = 100
    assert cache.expire() == 0
    audit(cache, [table])
    cache.close(table, b"")
    assert cache.expire() == 0
    assert 0 < (due(cache) or 0) <= 10 * SECOND
    clock.seconds = 110.1
    assert cache.expire() == 3
    audit(cache, [])


def test_a_pin_keeps_its_namespace() -> None:
    cache, clock = aging()
    serve(cache, ns("pinned"), [1, 2, 3])
    pin = cache.pin(ns("pinned"), pack([1, 2]))
    clock.seconds = 100
    assert cache.expire() == 0
    assert salts(cache) == ["pinned"]
    cache.unpin(pin.id)
    clock.seconds = 111
    assert cache.expire() == 3
    audit(cache, [])


@pytest.mark.parametrize("longer", [True, False])
def test_a_new_time_to_live_counts_from_the_last_use(longer: bool) -> None:
    cache, clock = aging(ttl=None if longer else 50.0)
    serve(cache, ns(), [1, 2, 3])
    clock.seconds = 5
    cache.set_quotas({"t": Quota(cache_ttl=20.0)})
    assert due(cache) == pytest.approx(15 * SECOND, abs=1000)
    clock.seconds = 20.1
    assert cache.expire() == 3
    audit(cache, [])


def test_without_a_time_to_live_any_more_nothing_expires() -> None:
    cache, clock = aging()
    serve(cache, ns(), [1, 2, 3])
    cache.set_quotas({"t": Quota()})
    clock.seconds = 1000
    assert due(cache) is None
    assert cache.expire() == 0
    audit(cache, [])


# Limits.


def test_at_the_limit_of_namespaces_the_emptiest_goes_and_of_those_the_oldest() -> None:
    cache = manager(max_namespaces=4)
    serve(cache, ns("large"), [1, 2, 3])
    serve(cache, ns("small"), [1])
    serve(cache, ns("small, newer"), [1])
    serve(cache, ns("medium"), [1, 2])
    serve(cache, ns("more", "other"), [1])
    serve(cache, ns("fifth"), [1, 2])
    audit(cache, [])
    assert salts(cache) == ["large", "small, newer", "medium", "fifth"]
    serve(cache, ns("sixth"), [1, 2])
    assert salts(cache) == ["large", "medium", "fifth", "sixth"]
    serve(cache, ns("seventh"), [1, 2])
    assert salts(cache) == ["large", "fifth", "sixth", "seventh"]
    assert salts(cache, "other") == ["more"]
    assert cache.accounts.of("t").evicted_by == {"": 4}
    audit(cache, [])


def test_a_running_or_pinned_namespace_does_not_go_at_the_limit() -> None:
    cache = manager(max_namespaces=2)
    serve(cache, ns("pinned"), [1])
    pin = cache.pin(ns("pinned"), pack([1]))
    running = cache.open(ns("running"), pack([1]))
    serve(cache, ns("third"), [1, 2, 3])
    audit(cache, [running])
    serve(cache, ns("fourth"), [1, 2, 3])
    # Only "third" could go; the fourth stays although there is one too many.
    assert salts(cache) == ["pinned", "running", "fourth"]
    cache.close(running, b"")
    cache.unpin(pin.id)
    audit(cache, [])
    serve(cache, ns("fifth"), [1, 2, 3])
    assert salts(cache) == ["fourth", "fifth"]


def test_at_a_high_limit_a_part_goes_at_once() -> None:
    cache = manager(pages=200, max_namespaces=64)
    for number in range(65):
        serve(cache, ns(str(number)), [1])
    audit(cache, [])
    assert salts(cache) == [str(number) for number in range(4, 65)]


def test_at_the_limit_of_nodes_leaves_go_by_the_policy() -> None:
    cache = manager(max_nodes=4)
    for first in range(1, 4):
        serve(cache, ns("one"), [10 * first, 10 * first + 1])
    serve(cache, ns("one", "other"), [1])
    serve(cache, ns("two"), [1, 2, 3])
    assert cache.accounts.of("t").nodes == 4
    serve(cache, ns("two"), [7])  # the oldest leaf goes whole
    audit(cache, [])
    assert cache.accounts.of("t").nodes == 4
    assert cache.peek(ns("one"), pack([10, 11, 12]))[0] == 0
    assert cache.peek(ns("one"), pack([20, 21, 22]))[0] == 2
    serve(cache, ns("two"), [1, 2, 4])  # a split makes two of one
    audit(cache, [])
    assert cache.accounts.of("t").nodes == 4
    assert cache.peek(ns("one"), pack([20, 21, 22]))[0] == 0
    assert cache.peek(ns("one"), pack([30, 31, 32]))[0] == 0
    assert cache.peek(ns("two"), pack([1, 2, 3, 5]))[0] == 3
    assert cache.accounts.of("other").nodes == 1


def test_running_sequences_may_exceed_the_limit_of_nodes_and_give_way_as_they_close() -> None:
    cache = manager(max_nodes=2)
    tables = []
    for first in range(5):
        table = cache.open(ns(), pack([first, 9]))
        assert cache.grow(table, 2)
        cache.commit(table, pack([first, 9]))
        tables.append(table)
    audit(cache, tables)
    assert cache.accounts.of("t").nodes == 5
    while tables:
        cache.close(tables.pop(), b"")
        audit(cache, tables)
    serve(cache, ns(), [0, 9])
    assert cache.accounts.of("t").nodes == 2
    audit(cache, [])


# Nothing is left.


def salts_at_random(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [f"{draw.getrandbits(128):032x}" for _ in range(count)]


def expect_nothing(cache: CacheManager) -> None:
    """Nothing of any namespace is left, in any structure."""
    audit(cache, [])
    account = cache.accounts.of("t")
    assert list(cache.forest.trees()) == []
    assert not account.trees
    assert list(account.victims) == []
    assert len(account.ghosts) <= GHOSTS
    assert cache.pool.free == cache.pool.total


@pytest.mark.parametrize("way", ["evict", "flush", "flush one by one", "expire", "limit"])
def test_ten_thousand_salts_leave_nothing_behind(way: str) -> None:
    clock = HandClock()
    cache = manager(
        500 if way == "evict" else 12_000,
        clock=clock,
        quotas={"t": Quota(cache_ttl=50_000.0)},
        max_namespaces=100 if way == "limit" else 20_000,
    )
    names = salts_at_random(0, 10_000)
    for name in names:
        clock.seconds += 1
        serve(cache, ns(name), [1, 2] if way == "evict" else [1])
    if way == "flush one by one":
        # The younger half first: at the end each one that goes is the first in the order.
        for name in names[5_000:] + names[:5_000]:
            cache.flush(ns(name))
    elif way == "expire":
        clock.seconds += 60_000
        assert cache.expire() == 10_000
        assert due(cache) is None
    else:
        cache.flush()
    expect_nothing(cache)
    assert cache.accounts.of("t").evicted == (20_000 if way == "evict" else 10_000)


def test_dead_namespaces_are_not_remembered_for_their_time_to_live() -> None:
    cache = manager(2000, quotas={"t": Quota(cache_ttl=1e9)})
    for name in salts_at_random(0, 2000):
        serve(cache, ns(name), [1])
    cache.flush()
    serve(cache, ns("last"), [1])
    gc.collect()
    assert sum(isinstance(one, Tree) for one in gc.get_objects()) < 100


def test_salts_leave_no_memory_behind() -> None:
    cache = manager(500)

    def blocks_after(seed: int, count: int) -> int:
        for name in salts_at_random(seed, count):
            serve(cache, ns(name), [1])
        cache.flush()
        cache.accounts.of(
            "t"
        ).ghosts.clear()  # a ring of fixed size, which would be counted as grown
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(0, 1000)
    assert blocks_after(1, 10_000) - before < 500


# Opting out.


def test_a_prompt_that_opts_out_of_insertion_leaves_nothing_chunk_by_chunk() -> None:
    cache = manager(page_size=2)
    tokens = list(range(12))
    table = cache.open(ns(), pack(tokens), insert=False)
    for end in (3, 4, 8, 12):
        assert cache.grow(table, end)
        cache.commit(table, pack(tokens[:end]))
        audit(cache, [table])
        assert table.lease.length == 0
        assert cache.accounts.resident == 0
    cache.close(table, pack([*tokens, 50, 51]))
    audit(cache, [])
    assert list(cache.forest.trees()) == []
    assert cache.pool.free == cache.pool.total
    assert serve(cache, ns(), tokens).cached_tokens == 0
    # And the same prompt without opting out is kept.
    assert serve(cache, ns(), tokens).cached_tokens == 10


def test_a_prompt_that_opts_out_of_insertion_still_finds_what_others_kept() -> None:
    cache = manager()
    serve(cache, ns(), [1, 2, 3])
    table = cache.open(ns(), pack([1, 2, 3, 4, 5]), insert=False)
    assert table.cached_tokens == 3
    assert cache.grow(table, 5)
    cache.commit(table, pack([1, 2, 3, 4, 5]))
    cache.close(table, pack([1, 2, 3, 4, 5]))
    audit(cache, [])
    assert cache.peek(ns(), pack([1, 2, 3, 4, 5, 6]))[0] == 3


def test_a_request_that_opts_out_of_the_lookup_finds_nothing_and_keeps_what_it_computes() -> None:
    cache = manager()
    serve(cache, ns(), [1, 2, 3])
    table = cache.open(ns(), pack([1, 2, 3, 4]), lookup=False)
    assert table.cached_tokens == 0
    assert cache.grow(table, 4)
    cache.commit(table, pack([1, 2, 3, 4]))
    audit(cache, [table])
    cache.close(table, pack([1, 2, 3, 4]))
    audit(cache, [])
    assert cache.accounts.resident == 4  # the three that were there, and one more
    assert cache.peek(ns(), pack([1, 2, 3, 4, 5]))[0] == 4
    assert (tree(cache).lookups, cache.accounts.of("t").lookups) == (1, 1)
