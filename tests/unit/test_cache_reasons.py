"""Each lookup says what it found and why not more."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from clocks import HandClock

from ktserve.cache.audit import audit
from ktserve.cache.ghosts import GHOSTS
from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.cache.reasons import Reason
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack


class World:
    """A cache, its clock and what runs."""

    def __init__(
        self,
        pages: int = 20,
        page_size: int = 1,
        *,
        enabled: bool = True,
        sharing: CacheSharing = "shared",
        quotas: Mapping[str, Quota] | None = None,
        max_nodes: int | None = None,
        max_namespaces: int = 100,
    ) -> None:
        self.clock = HandClock()
        self.cache = CacheManager(
            PagePool(pages),
            page_size,
            enabled=enabled,
            sharing=sharing,
            quotas=quotas,
            max_nodes=max_nodes,
            max_namespaces=max_namespaces,
            clock=self.clock,
        )

    def serve(self, tokens: list[int], salt: str | None = None, tenant: str = "t") -> BlockTable:
        """A request from beginning to end."""
        prompt = pack(tokens)
        table = self.cache.open(ns(salt, tenant), prompt)
        assert self.cache.grow(table, len(tokens))
        self.cache.close(table, prompt)
        audit(self.cache, [])
        return table

    def reason(self, tokens: list[int], salt: str | None = None, *, lookup: bool = True) -> Reason:
        """What a request that keeps nothing is told."""
        table = self.cache.open(ns(salt), pack(tokens), insert=False, lookup=lookup)
        self.cache.close(table, b"")
        audit(self.cache, [])
        assert table.reason is not None
        assert table.reason.tokens == table.cached_tokens
        return table.reason

    def take(self, pages: int, tenant: str = "t") -> None:
        """Evict ``pages`` pages for a request of ``tenant``, which keeps nothing."""
        table = self.cache.open(ns("taker", tenant), pack([1]), insert=False)
        evicted = self.cache.accounts.evicted
        assert self.cache.grow(table, self.cache.page_size * (self.cache.pool.free + pages))
        assert self.cache.accounts.evicted == evicted + pages
        self.cache.close(table, b"")
        audit(self.cache, [])


def ns(salt: str | None = None, tenant: str = "t") -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)


# What was found, and what was never there.


def test_nothing_known_is_cold() -> None:
    world = World()
    assert world.reason([1, 2, 3]) == Reason(kind="cold")
    world.serve([9, 2, 3])
    assert world.reason([1, 2, 3]) == Reason(kind="cold")


def test_another_namespace_is_no_reason() -> None:
    world = World()
    world.serve([1, 2, 3])
    world.serve([1, 2, 3], tenant="other")
    assert world.reason([1, 2, 3], "salt") == Reason(kind="cold")


def test_all_that_was_ever_known_is_a_hit() -> None:
    world = World()
    world.serve([1, 2, 3])
    assert world.reason([1, 2, 3, 4]) == Reason(kind="hit", tokens=3)
    assert world.reason([1, 2, 3]) == Reason(kind="hit", tokens=2)  # the last is always computed


@pytest.mark.parametrize(("length", "kind"), [(1, "below_page"), (4, "below_page"), (5, "cold")])
def test_a_prompt_that_fills_no_page_beside_its_last_token(length: int, kind: str) -> None:
    world = World(page_size=4)
    assert world.reason(list(range(length))).kind == kind


def test_opted_out_of_the_lookup() -> None:
    world = World()
    world.serve([1, 2, 3])
    assert world.reason([1, 2, 3, 4], lookup=False) == Reason(kind="opted_out")
    assert world.reason([1, 2, 3, 4]).tokens == 3


def test_disabled() -> None:
    world = World(enabled=False)
    world.serve([1, 2, 3])
    assert world.reason([1, 2, 3, 4]) == Reason(kind="disabled")
    assert world.reason([1, 2, 3, 4], lookup=False) == Reason(kind="disabled")
    assert world.cache.accounts.of("t").lookups == 0


# Where it went another way.


@pytest.mark.parametrize(
    ("tokens", "at"), [([1, 2, 9, 9], 2), ([1, 2, 3, 9, 9], 3), ([1, 9, 9, 9], 1)]
)
def test_diverged_inside_an_edge(tokens: list[int], at: int) -> None:
    world = World()
    world.serve([1, 2, 3, 4, 5])
    assert world.reason(tokens) == Reason(kind="diverged", tokens=at, at=at)


def test_diverged_at_a_fork() -> None:
    world = World()
    world.serve([1, 2, 3])
    world.serve([1, 2, 4])
    assert world.reason([1, 2, 5, 6]) == Reason(kind="diverged", tokens=2, at=2)


@pytest.mark.parametrize(
    ("tokens", "found", "at"),
    [
        ([1, 2, 3, 9, 5, 6], 0, 3),  # inside the first page of all
        ([1, 9, 3, 4, 5, 6], 0, 1),
        ([1, 2, 3, 4, 5, 9, 7, 8, 9], 4, 5),  # in the second page of an edge
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9], 8, 9),  # in the first page after a fork
    ],
)
def test_diverged_inside_a_page(tokens: list[int], found: int, at: int) -> None:
    world = World(page_size=4, pages=30)
    world.serve(list(range(1, 13)))
    world.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0])
    assert world.reason(tokens) == Reason(kind="diverged", tokens=found, at=at)


def test_a_page_whose_first_token_differs_is_cold() -> None:
    world = World(page_size=4)
    world.serve([1, 2, 3, 4])
    assert world.reason([9, 2, 3, 4, 5]) == Reason(kind="cold")


# What was evicted: by whom and when.


def test_evicted_by_the_tenant_itself() -> None:
    world = World()
    world.serve([1, 2, 3])
    world.take(3)
    world.clock.seconds = 7
    reason = world.reason([1, 2, 3, 4])
    assert (reason.kind, reason.tokens, reason.at, reason.by) == ("evicted", 0, 0, "own")
    assert reason.seconds == pytest.approx(7, abs=0.001)


def test_evicted_by_another_tenant() -> None:
    world = World()
    world.serve([1, 2, 3])
    world.take(3, tenant="other")
    assert world.reason([1, 2, 3, 4]).by == "other"


@pytest.mark.parametrize("way", ["flush", "expire", "namespaces", "nodes", "quota"])
def test_evicted_by_the_system(way: str) -> None:
    world = World(
        quotas={"t": Quota(cache_ttl=5.0)},
        max_namespaces=1 if way == "namespaces" else 100,
        max_nodes=1 if way == "nodes" else None,
    )
    world.serve([1, 2, 3])
    world.clock.seconds = 6
    match way:
        case "flush":
            assert world.cache.flush(ns()) == 3
        case "expire":
            assert world.cache.expire() == 3
        case "namespaces":
            world.serve([1], "salt")
        case "nodes":
            world.serve([5, 6, 7])
        case _:
            # A cap of one page: the two at the tail go.
            world.cache.set_quotas({"t": Quota(cache_cap=0.05)})
    world.clock.seconds = 10
    reason = world.reason([1, 2, 3, 4])
    found = 1 if way == "quota" else 0
    assert (reason.kind, reason.tokens, reason.at, reason.by) == (
        "evicted",
        found,
        found,
        "system",
    )
    assert reason.seconds == pytest.approx(4, abs=0.001)


def test_a_part_is_found_and_the_rest_was_evicted() -> None:
    world = World(page_size=2)
    world.serve(list(range(8)))
    world.take(1)
    reason = world.reason([*range(8), 99])
    assert (reason.kind, reason.tokens, reason.at, reason.by) == ("evicted", 6, 6, "own")


def test_the_newest_eviction_counts_after_a_second_one() -> None:
    world = World()
    world.serve([1, 2, 3, 4])
    world.take(1)
    world.clock.seconds = 5
    world.take(2, tenant="other")
    world.clock.seconds = 8
    reason = world.reason([1, 2, 3, 4, 5])
    assert (reason.tokens, reason.at, reason.by) == (1, 1, "other")
    assert reason.seconds == pytest.approx(3, abs=0.001)


def test_what_came_back_is_not_evicted_any_more() -> None:
    world = World()
    world.serve([1, 2, 3])
    world.take(3)
    world.serve([1, 2, 3])
    assert world.reason([1, 2, 3, 4]) == Reason(kind="hit", tokens=3)
    world.clock.seconds = 5
    world.take(3, tenant="other")
    world.clock.seconds = 8
    reason = world.reason([1, 2, 3, 4])
    assert (reason.kind, reason.by) == ("evicted", "other")
    assert reason.seconds == pytest.approx(3, abs=0.001)


def test_a_child_is_evicted_and_then_its_parent() -> None:
    world = World()
    world.serve([1, 2, 3])
    world.serve([1, 2, 4])
    world.serve([7])  # keeps the tree
    world.take(1)
    assert world.reason([1, 2, 3, 9]).tokens == 2
    assert world.reason([1, 2, 3, 9]).kind == "evicted"
    world.take(1)
    world.serve([7])
    world.clock.seconds = 4
    world.take(2)
    world.clock.seconds = 6
    for tokens in ([1, 2, 3, 9], [1, 2, 4, 9]):
        reason = world.reason(tokens)
        assert (reason.kind, reason.tokens, reason.at) == ("evicted", 0, 0)
        assert reason.seconds == pytest.approx(2, abs=0.001)


def test_a_tree_that_was_dropped_is_remembered_when_it_is_opened_again() -> None:
    world = World()
    world.serve([1, 2, 3])
    world.take(3)
    assert world.cache.forest.tree(ns()) is None
    assert world.reason([1, 2, 3, 4]).kind == "evicted"
    # And it is that of its own namespace alone.
    assert world.reason([1, 2, 3, 4], "salt") == Reason(kind="cold")
    world.serve([8, 9])
    assert world.reason([1, 2, 3, 4]).kind == "evicted"


def test_a_split_keeps_what_is_known_of_the_tail() -> None:
    world = World()
    world.serve([1, 2, 3, 4])
    world.take(1)
    world.serve([1, 9])
    reason = world.reason([1, 2, 3, 4, 5])
    assert (reason.kind, reason.tokens) == ("evicted", 3)


def test_old_evictions_are_forgotten() -> None:
    world = World(pages=1)
    world.serve([1])
    for number in range(2, GHOSTS + 1):
        world.serve([number])
    assert world.reason([1, 0]).kind == "evicted"
    for number in range(5000, 5003):
        world.serve([number])
    assert world.reason([1, 0]) == Reason(kind="cold")
    assert len(world.cache.accounts.of("t").ghosts) == GHOSTS


def test_a_page_is_not_evicted_behind_a_prefix_where_it_never_was() -> None:
    """[1, 2, 3, 4] lost 4 and then 3; nobody ever sent [1, 2, 4]."""
    world = World()
    world.serve([1, 2, 3, 4])
    world.take(1)
    world.take(1)
    assert world.reason([1, 2, 3, 9]).kind == "evicted"
    assert world.reason([1, 2, 4, 9]) == Reason(kind="hit", tokens=2)


def test_a_leaf_that_grew_does_not_carry_its_evictions_along() -> None:
    """[1, 2, 3] lost 3 and goes on as [1, 2, 7]; nobody ever sent [1, 2, 7, 3]."""
    world = World()
    world.serve([1, 2, 3])
    world.take(1)
    world.serve([1, 2, 7])
    assert world.reason([1, 2, 7, 3, 9]) == Reason(kind="hit", tokens=3)


# A sequence that starts over.


def test_a_second_opening_is_no_lookup_and_has_no_reason() -> None:
    world = World()
    world.serve([1, 2, 3])
    account = world.cache.accounts.of("t")
    before = (account.lookups, account.hits, account.hit_tokens, account.hit_rate)
    hits = [node.hits for tree in account.trees.values() for node in tree.walk()]
    table = world.cache.open(ns(), pack([1, 2, 3, 4]), first=False)
    assert table.cached_tokens == 3
    assert table.reason is None
    assert (account.lookups, account.hits, account.hit_tokens, account.hit_rate) == before
    assert [n.hits for tree in account.trees.values() for n in tree.walk()] == hits
    world.cache.close(table, b"")
    # The first opening does all of that.
    assert world.reason([1, 2, 3, 4]).kind == "hit"
    assert account.lookups == before[0] + 1
    assert [n.hits for tree in account.trees.values() for n in tree.walk()] == [hits[0] + 1]


# For people.


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (Reason(kind="hit", tokens=3), "hit 3 tokens"),
        (Reason(kind="cold"), "cold"),
        (Reason(kind="below_page"), "below a page"),
        (Reason(kind="opted_out"), "opted out"),
        (Reason(kind="disabled"), "disabled"),
        (Reason(kind="diverged", at=2), "diverged at token 2"),
        (
            Reason(kind="diverged", tokens=4, at=6),
            "diverged at token 6, 4 tokens before it found",
        ),
        (
            Reason(kind="evicted", tokens=4, at=4, seconds=2.04, by="other"),
            "evicted 2.0 s ago by another tenant at token 4, 4 tokens before it found",
        ),
        (
            Reason(kind="evicted", at=0, seconds=0.0, by="own"),
            "evicted 0.0 s ago by the tenant itself at token 0",
        ),
        (
            Reason(kind="evicted", at=0, seconds=100.0, by="system"),
            "evicted 100.0 s ago by the system at token 0",
        ),
    ],
)
def test_a_reason_is_one_line_for_people(reason: Reason, line: str) -> None:
    assert str(reason) == line
