"""Views of the live forest: what they show is there, and they change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from cache_driver import SETUPS, Driver, Setup, fingerprint

from ktserve.cache import forest
from ktserve.cache.accounts import Account
from ktserve.cache.kept import PublicPrefix
from ktserve.cache.manager import CacheManager
from ktserve.cache.node import Node
from ktserve.cache.pool import PagePool
from ktserve.cache.records import Kind, Records, Why
from ktserve.cache.snapshot import snapshot
from ktserve.cache.walk import (
    Cursor,
    Order,
    Page,
    children,
    elsewhere,
    evictions,
    find,
    path,
    victims,
)
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import pack


@contextmanager
def unchanged(cache: CacheManager) -> Iterator[None]:
    before = fingerprint(cache)
    yield
    assert fingerprint(cache) == before


def namespace(tenant: str, salt: str | None = None, adapter: int | None = None) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=adapter)


def cache_of(pages: int = 200, *, reserve_public: bool = False) -> CacheManager:
    times = itertools.count(1)
    return CacheManager(
        PagePool(pages),
        1,
        records=Records(),
        reserve_public=reserve_public,
        pin_budget=0.3,
        clock=lambda: next(times),
    )


def serve(cache: CacheManager, where: Namespace, tokens: list[int]) -> None:
    table = cache.open(where, pack(tokens))
    assert cache.grow(table, len(tokens))
    cache.close(table, pack(tokens))


def root(cache: CacheManager, where: Namespace) -> Node:
    tree = cache.forest.tree(where)
    assert tree is not None
    return tree.root


A, B = namespace("a"), namespace("b")


@pytest.fixture
def fan() -> CacheManager:
    """Nine children of a root, of sizes that repeat; some were hit."""
    cache = cache_of()
    for first in range(9):
        serve(cache, A, [first] * (1 + first % 4))
    for first in (2, 6, 6):
        serve(cache, A, [first] * (1 + first % 4))
    return cache


def pages_of(
    cache: CacheManager, order: Order, count: int, *, descending: bool
) -> list[list[Node]]:
    found, after = [], None
    while True:
        page = children(root(cache, A), order, count, descending=descending, after=after)
        found.append(page.nodes)
        after = page.after
        if after is None:
            return found


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    ("order", "attribute"),
    [
        ("size", "size"),
        ("last_used", "last_used"),
        ("created", "created"),
        ("hits", "hits"),
        ("priority", "priority"),
        ("locks", "locks"),
        ("id", "id"),
    ],
)
def test_children_come_in_order_each_once(
    fan: CacheManager, order: Order, attribute: str, descending: bool
) -> None:
    with unchanged(fan):
        pages = pages_of(fan, order, 4, descending=descending)
    assert [len(page) for page in pages] == [4, 4, 1]
    seen = [node for page in pages for node in page]
    values = [getattr(node, attribute) for node in seen]
    assert values == sorted(values, reverse=descending)
    assert {node.id for node in seen} == {n.id for n in root(fan, A).children.values()}
    assert len(set(values)) > 1 or attribute in ("priority", "locks")


def test_children_by_their_own_children() -> None:
    cache = cache_of()
    for tokens in ([1, 1], [2, 1], [2, 2], [3, 1], [3, 2], [3, 3]):
        serve(cache, A, tokens)
    page = children(root(cache, A), "children", 2, descending=True)
    assert [len(node.children) for node in page.nodes] == [3, 2]


def test_a_page_that_ends_with_the_last_child_has_no_next(fan: CacheManager) -> None:
    assert children(root(fan, A), "id", 9).after is None
    assert children(root(fan, A), "id", 8).after is not None
    with pytest.raises(ValueError, match="the least is 1"):
        children(root(fan, A), "id", 0)


def test_a_cursor_outlives_its_node_and_skips_what_came_before_it(fan: CacheManager) -> None:
    def page(count: int, after: Cursor | None = None) -> Page:
        return children(root(fan, A), "hits", count, descending=True, after=after)

    first = page(3)
    rest = page(9, first.after).nodes
    given = fan.forest.shrink(fan.accounts.of("a"), Why.NODES, nodes=1)
    fan.pool.give_back(np.frombuffer(given, dtype=np.int64))
    # The last of the page is gone, those before it are there.
    there = list(root(fan, A).children.values())
    assert [node in there for node in first.nodes] == [True, True, False]
    serve(fan, A, [50])
    second = page(9, first.after).nodes
    assert second[:-1] == rest
    assert bytes(second[-1].key) == pack([50])


def test_a_node_is_found_by_its_id_and_knows_its_way_up() -> None:
    cache = cache_of()
    serve(cache, B, [1, 2, 3])
    serve(cache, A, [1, 2, 3, 4])
    serve(cache, A, [1, 2, 5])
    tree = cache.forest.tree(A)
    assert tree is not None
    with unchanged(cache):
        for node in [*tree.roots(), *tree.walk()]:
            assert find(cache.forest, node.id) is node
        assert find(cache.forest, 999) is None
    leaf = next(node for node in tree.walk() if bytes(node.key) == pack([5]))
    steps = path(leaf)
    assert [bytes(step.key) for step in steps] == [pack([5]), pack([1, 2]), b""]
    assert steps[-1] is tree.root


@pytest.fixture(params=SETUPS, ids=lambda s: f"{s.sharing}-{s.policy}-page{s.page_size}")
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    chosen: Setup = request.param
    monkeypatch.setattr(forest, "EDGE_TOKENS", chosen.edge)
    return Driver(chosen, seed=5)


def wander(driver: Driver) -> None:
    for _ in range(driver.random.randrange(1, 60)):
        driver.step()
    driver.time += 1_000_000  # later than any tick until now


def evicted(driver: Driver, since: int) -> list[tuple[int, int]]:
    """Node and pages of each eviction since a record."""
    size = driver.cache.page_size
    new, lost = driver.records.since(since)
    assert not lost
    return [(one.node, one.tokens // size) for one in new if one.kind == Kind.EVICTED]


def test_a_tenants_next_victims_are_those_that_go(driver: Driver) -> None:
    cache = driver.cache
    parents = 0
    for _ in range(50):
        wander(driver)
        account = driver.random.choice(list(cache.accounts))
        count = driver.random.randrange(1, 15)
        with unchanged(cache):
            nodes = list(itertools.islice(victims(cache.accounts, account), count))
        expected = [(node.id, node.size) for node in nodes]
        parents += sum(bool(node.children) for node in nodes)
        since = driver.records.next_seq
        given = cache.forest.shrink(account, Why.NODES, nodes=count)
        cache.pool.give_back(np.frombuffer(given, dtype=np.int64))
        assert evicted(driver, since) == expected
    assert parents > 5  # nodes that come to be leaves on the way were met


def test_what_would_be_evicted_for_a_tenant_is_what_goes(driver: Driver) -> None:
    cache = driver.cache
    givers: set[tuple[str, ...]] = set()
    for _ in range(80):
        wander(driver)
        pick = driver.random
        taker = cache.accounts.of(pick.choice(["a", "b", "c"]))
        count = pick.randrange(1, 40)
        own = pick.choice([0, 0, pick.randrange(count)])
        with unchanged(cache):
            expected = list(evictions(cache.accounts, taker, count, tick=driver.time, own=own))
            named = [(one.node.id, one.pages) for one in expected]
            givers.add(tuple(one.node.tree.account.tenant for one in expected))
        since = driver.records.next_seq
        given = cache.forest.evict(count, taker, own=own)
        cache.pool.give_back(np.frombuffer(given, dtype=np.int64))
        assert evicted(driver, since) == named
    mixed = [names for names in givers if len(set(names)) > 1]
    assert bool(mixed) == (cache.accounts.sharing != "partitioned")


def test_a_snapshot_changes_nothing(driver: Driver) -> None:
    for _ in range(5):
        wander(driver)
        with unchanged(driver.cache):
            parts = list(snapshot(driver.cache.forest, driver.records, nodes=3))
        assert sum(tree.last for part in parts for tree in part.trees) == len(
            list(driver.cache.forest.trees())
        )


# Elsewhere.


def test_elsewhere_names_longer_prefixes_the_longest_first() -> None:
    cache = cache_of()
    prompt = [1, 2, 3, 4, 5, 6]
    serve(cache, A, [1, 2, 9])
    serve(cache, namespace("a", salt="x"), [1, 2, 3, 4, 9])
    serve(cache, B, prompt)
    serve(cache, namespace("c"), [1, 2])  # no longer than its own
    serve(cache, namespace("d"), [7, 2, 3])
    with unchanged(cache):
        found = elsewhere(cache.forest, A, pack(prompt), 5, 10)
    where = [(tree.namespace, pages) for tree, pages in found]
    assert where == [(B, 5), (namespace("a", salt="x"), 4)]
    assert [tree.namespace for tree, _ in elsewhere(cache.forest, A, pack(prompt), 5, 1)] == [B]
    # For the one that holds most there is nothing more anywhere.
    assert elsewhere(cache.forest, B, pack(prompt), 5, 10) == []
    # And for a namespace without a tree all that hold something.
    assert len(elsewhere(cache.forest, namespace("new"), pack(prompt), 5, 10)) == 4


def test_another_adapters_prefix_is_no_hit_that_was_missed() -> None:
    cache = cache_of()
    prompt = [1, 2, 3, 4]
    serve(cache, namespace("b", adapter=1), prompt)
    assert elsewhere(cache.forest, A, pack(prompt), 4, 10) == []
    mine = namespace("a", adapter=1)
    assert [pages for _, pages in elsewhere(cache.forest, mine, pack(prompt), 4, 10)] == [4]


def test_what_lies_behind_a_public_prefix_counts() -> None:
    cache = cache_of(reserve_public=True)
    prefix = cache.publish("intro", ["a"], pack([1, 2, 3]))
    serve(cache, prefix.namespace, [1, 2, 3])
    assert cache.hold(prefix)
    serve(cache, A, [1, 2, 3, 4, 5])
    prompt = pack([1, 2, 3, 4, 5, 6])
    with unchanged(cache):
        found = elsewhere(cache.forest, B, prompt, 5, 10, [prefix])
    assert [(tree.namespace, pages) for tree, pages in found] == [(A, 5), (prefix.namespace, 3)]
    # The reader itself has it all.
    assert elsewhere(cache.forest, A, prompt, 5, 10, [prefix]) == []


def test_a_fingerprint_sees_an_age_and_an_order() -> None:
    """The control of every `unchanged` here."""
    driver = Driver(SETUPS[0], seed=6)
    for _ in range(200):
        driver.step()
    cache = driver.cache
    tree = next(iter(cache.forest.trees()))
    node = next(tree.walk())
    before = fingerprint(cache)
    node.last_used += 1
    assert fingerprint(cache) != before
    node.last_used -= 1
    assert fingerprint(cache) == before
    cache.forest.now()
    assert fingerprint(cache) != before
    before = fingerprint(cache)
    first = next(one for one in map(next_victim, cache.accounts) if one is not None)
    first.tree.account.victims.remove(first)
    assert fingerprint(cache) != before


def next_victim(account: Account) -> Node | None:
    return account.victims.first()


def public_cache() -> tuple[CacheManager, PublicPrefix]:
    cache = cache_of(reserve_public=True)
    prefix = cache.publish("intro", ["a", "b"], pack([1, 2, 3]))
    serve(cache, prefix.namespace, [1, 2, 3])
    assert cache.hold(prefix)
    return cache, prefix


def test_a_public_prefix_that_it_may_read_is_no_hit_that_was_missed() -> None:
    cache, prefix = public_cache()
    prompt = pack([1, 2, 3, 4])
    assert cache.peek(A, prompt)[0] == 3
    assert elsewhere(cache.forest, A, prompt, 3, 10, [prefix]) == []
    stranger = namespace("z")
    found = elsewhere(cache.forest, stranger, prompt, 3, 10, [prefix])
    assert [(tree.namespace, pages) for tree, pages in found] == [(prefix.namespace, 3)]


def test_who_holds_nothing_behind_a_public_prefix_is_not_named_for_it() -> None:
    cache, prefix = public_cache()
    prompt = pack([1, 2, 3, 4])
    serve(cache, B, [9, 9])  # keeps its tree
    cache.close(cache.open(B, prompt, insert=False), b"")
    tree = cache.forest.tree(B)
    assert tree is not None
    assert prefix.id in tree.grafts
    found = elsewhere(cache.forest, namespace("z"), prompt, 3, 10, [prefix])
    assert [(tree.namespace, pages) for tree, pages in found] == [(prefix.namespace, 3)]
    # Nor for more pages than count.
    found = elsewhere(cache.forest, namespace("z"), pack([1, 2, 3]), 2, 10, [prefix])
    assert [(tree.namespace, pages) for tree, pages in found] == [(prefix.namespace, 2)]
