"""Which of a tenant's pages go first: each policy on the same history, and page by page."""

from __future__ import annotations

import gc
import sys

import pytest
from clocks import TickingClock

from ktserve.cache.audit import audit
from ktserve.cache.manager import CacheManager
from ktserve.cache.policies import EvictionPolicy
from ktserve.cache.pool import PagePool
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import pack, unpack

POLICIES: list[EvictionPolicy] = ["lru", "lfu", "slru", "fifo", "priority"]
PAGES = 64


def manager(policy: EvictionPolicy, page_size: int = 1, pages: int = PAGES) -> CacheManager:
    return CacheManager(
        PagePool(pages), page_size, sharing="shared", policy=policy, clock=TickingClock()
    )


def ns(tenant: str = "t", salt: str | None = None) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)


def insert(
    cache: CacheManager, tokens: list[int], priority: int = 0, namespace: Namespace | None = None
) -> None:
    prompt = pack(tokens)
    table = cache.open(namespace or ns(), prompt, priority=priority)
    assert cache.grow(table, len(tokens))
    cache.close(table, prompt)
    audit(cache, [])


def use(cache: CacheManager, tokens: list[int], priority: int = 0) -> None:
    """A request that goes on from ``tokens`` and keeps nothing: a hit on all of them."""
    table = cache.open(ns(), pack([*tokens, 99]), insert=False, priority=priority)
    assert table.cached_tokens == len(tokens)
    cache.close(table, b"")
    audit(cache, [])


def take(cache: CacheManager, pages: int) -> None:
    """Evict for a request that needs ``pages`` pages more than are free, and forget it."""
    table = cache.open(ns("t", "taker"), pack([1]), insert=False)
    before = cache.accounts.evictable
    assert cache.grow(table, cache.page_size * (cache.pool.free + pages))
    assert cache.accounts.evictable == before - pages, "exactly as many as were asked for"
    audit(cache, [table])
    cache.close(table, b"")
    audit(cache, [])


def left(cache: CacheManager, namespace: Namespace | None = None) -> set[tuple[int, ...]]:
    """The edges of the tree."""
    tree = cache.forest.tree(namespace or ns())
    return set() if tree is None else {tuple(unpack(bytes(n.key)).tolist()) for n in tree.walk()}


def order(cache: CacheManager) -> str:
    """The letters of `history` in the order in which they go."""
    names = {1: "A", 2: "B", 3: "C", 4: "D", 5: "E"}
    gone = ""
    while before := left(cache):
        take(cache, 1)
        gone += "".join(names[edge[0]] for edge in before - left(cache))
    return gone


def history(policy: EvictionPolicy) -> CacheManager:
    """Five prompts of one page: when each came, how often and when it was used, how important."""
    cache = manager(policy)
    insert(cache, [1])
    insert(cache, [2], priority=5)
    insert(cache, [3], priority=9)
    insert(cache, [4], priority=1)
    insert(cache, [5], priority=2)
    for tokens in ([3], [2], [2], [2], [1], [1]):
        use(cache, tokens)
    return cache


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", "DECBA"),
        ("lfu", "DECAB"),
        ("slru", "DECBA"),
        ("fifo", "ABCDE"),
        ("priority", "ADEBC"),
    ],
)
def test_one_history_and_the_order_of_its_victims(policy: EvictionPolicy, expected: str) -> None:
    assert order(history(policy)) == expected


def scan(policy: EvictionPolicy) -> CacheManager:
    """A prompt that is used once, and then many that never come again."""
    cache = manager(policy)
    insert(cache, [1])
    use(cache, [1])
    for number in range(2, 6):
        insert(cache, [number])
    use(cache, [5])
    use(cache, [5])
    insert(cache, [4])  # comes again, but only as a whole prompt: no hit, and not the oldest
    return cache


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", "ABCED"),
        ("lfu", "BCDAE"),
        ("slru", "BCDAE"),
        ("fifo", "ABCDE"),
        ("priority", "ABCED"),
    ],
)
def test_a_scan_and_the_order_of_its_victims(policy: EvictionPolicy, expected: str) -> None:
    assert order(scan(policy)) == expected


def test_each_policy_differs_from_each_other_one() -> None:
    orders = {policy: (order(history(policy)), order(scan(policy))) for policy in POLICIES}
    assert len(set(orders.values())) == len(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_go_one_by_one_from_the_tail(policy: EvictionPolicy, page_size: int) -> None:
    cache = manager(policy, page_size)
    tokens = list(range(10 * page_size))
    insert(cache, tokens)
    for gone in range(1, 11):
        take(cache, 1)
        kept = tokens[: (10 - gone) * page_size]
        assert left(cache) == ({tuple(kept)} if kept else set())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 11, 12])
def test_exactly_as_many_pages_go_as_are_asked_for(policy: EvictionPolicy, count: int) -> None:
    cache = manager(policy)
    for first in range(4):
        insert(cache, [10 * first, 10 * first + 1, 10 * first + 2])
    take(cache, count)
    assert cache.accounts.resident == 12 - count
    assert cache.accounts.evicted == count


@pytest.mark.parametrize("policy", POLICIES)
def test_an_inner_node_goes_after_its_children(policy: EvictionPolicy) -> None:
    cache = manager(policy)
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4], priority=7)
    insert(cache, [1, 5])
    for number in range(6):
        insert(cache, [20 + number], priority=number)
    use(cache, [1, 5])
    while cache.accounts.resident:
        before = left(cache)
        take(cache, 1)
        gone = before - left(cache)
        # (2,) is above (3,) and (4,), and (1,) above all three.
        assert not ((2,) in gone and {(3,), (4,)} & before)
        assert not ((1,) in gone and {(2,), (5,)} & before)
    assert left(cache) == set()


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
def test_a_use_after_queueing_counts(policy: EvictionPolicy) -> None:
    """A place in the order from before a use puts nobody before its turn."""
    cache = manager(policy)
    for number in range(1, 6):
        insert(cache, [number])
    for number in (1, 2, 4):
        use(cache, [number], priority=1)
    for number in (4, 1, 2):
        use(cache, [number], priority=1)
    assert order(cache) == "CEDAB"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_leaf_that_was_trimmed_and_grows_again_keeps_its_place(policy: EvictionPolicy) -> None:
    cache = manager(policy)
    insert(cache, [1, 1, 1])
    take(cache, 2)
    insert(cache, [1, 1, 1], priority=3)
    insert(cache, [2, 2, 2])
    assert left(cache) == {(1, 1, 1), (2, 2, 2)}
    take(cache, 3)
    # Its second coming was a hit on the page that was left, and more important.
    first = (1, 1, 1) if policy in {"lru", "fifo"} else (2, 2, 2)
    assert first not in left(cache)


def test_the_order_over_tenants_is_one_in_a_shared_pool() -> None:
    """The victim is the first of all by the policy, and not the oldest."""
    cache = manager("priority")
    other = ns("other")
    insert(cache, [1], priority=5)
    insert(cache, [2], priority=1, namespace=other)
    take(cache, 1)
    assert left(cache) == {(1,)}
    assert left(cache, other) == set()


@pytest.mark.parametrize("policy", POLICIES)
def test_many_hits_on_one_prefix_leave_no_memory_behind(policy: EvictionPolicy) -> None:
    cache = manager(policy)
    for first in (7, 1, 8):
        insert(cache, [first])

    def blocks_after(hits: int) -> int:
        for _ in range(hits):
            table = cache.open(ns(), pack([1, 99]), insert=False)
            cache.close(table, b"")
        take(cache, 0)
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(100)
    assert blocks_after(3000) - before < 300
