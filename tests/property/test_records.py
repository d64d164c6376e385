"""Records alone rebuild the forest, whatever happens to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cache_driver import SETUPS, Driver, Setup

from ktserve.cache import forest
from ktserve.cache.audit import audit
from ktserve.cache.manager import CacheManager
from ktserve.cache.node import Node
from ktserve.cache.records import Kind, Record, Records, Why
from ktserve.cache.shadow import CannotFollow, Shadow, ShadowNode, Slice
from ktserve.cache.snapshot import snapshot

EACH = 100_000 // len(SETUPS) + 1


def of_node(node: Node | ShadowNode, tokens: int) -> tuple[int, ...]:
    parent = 0 if node.parent is None else node.parent.id
    return (node.id, parent, tokens, node.locks, node.last_used, node.created, node.hits)


def of_forest(cache: CacheManager) -> dict[int, Any]:
    """Everything that a shadow should know, by tree."""
    size = cache.page_size
    return {
        tree.index: {
            "tenant": tree.account.index,
            "root": tree.root.id,
            "grafts": {public: root.id for public, root in tree.grafts.items()},
            "counts": (tree.resident * size, tree.locked * size, tree.nodes, tree.leases),
            "last_used": tree.last_used,
            "nodes": sorted(of_node(n, n.size * size) for n in [*tree.roots(), *tree.walk()]),
        }
        for tree in cache.forest.trees()
    }


def of_shadow(shadow: Shadow) -> dict[int, Any]:
    nodes: dict[int, list[tuple[int, ...]]] = {index: [] for index in shadow.trees}
    for node in shadow.nodes.values():
        assert all(child.parent is node for child in node.children.values())
        assert node.parent is None or node.parent.children[node.id] is node
        nodes[node.namespace].append(of_node(node, node.tokens))
    return {
        index: {
            "tenant": tree.tenant,
            "root": tree.root.id,
            "grafts": {public: root.id for public, root in tree.grafts.items()},
            "counts": (tree.resident, tree.locked, tree.nodes, tree.leases),
            "last_used": tree.last_used,
            "nodes": sorted(nodes[index]),
        }
        for index, tree in shadow.trees.items()
    }


def follow(shadow: Shadow, records: Records) -> list[Record]:
    new, lost = records.since(shadow.seq)
    assert lost == 0
    for record in new:
        shadow.apply(record)
    return new


@pytest.fixture(params=SETUPS, ids=lambda s: f"{s.sharing}-{s.policy}-page{s.page_size}")
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Setup:
    chosen: Setup = request.param
    monkeypatch.setattr(forest, "EDGE_TOKENS", chosen.edge)
    return chosen


def test_records_alone_rebuild_the_forest(setup: Setup) -> None:
    driver, shadow = Driver(setup, seed=1), Shadow()
    kinds: set[int] = set()
    reasons: set[int] = set()
    most = 0
    for number in range(1, EACH + 1):
        driver.step()
        if number % 1000 == 0:
            for record in follow(shadow, driver.records):
                kinds.add(record.kind)
                reasons.add(record.reason)
            assert of_shadow(shadow) == of_forest(driver.cache)
            most = max(most, len(shadow.nodes))
    audit(driver.cache, [table for table, _ in driver.running])
    # It was about something: all that this cache can do, and some nodes at a time.
    assert most > 20
    assert kinds == expected_kinds(setup)
    assert reasons == expected_reasons(setup)


def expected_kinds(setup: Setup) -> set[Kind]:
    grafted = setup.options.get("reserve_public", True)
    never = {Kind.REPAIRED} if grafted else {Kind.REPAIRED, Kind.GRAFTED}
    return set(Kind) - never


def expected_reasons(setup: Setup) -> set[Why]:
    reasons = set(Why)
    if setup.sharing == "partitioned":
        reasons.remove(Why.OTHER)
    if "max_namespaces" not in setup.options:
        reasons.remove(Why.NAMESPACES)
    if "max_nodes" not in setup.options:
        reasons.remove(Why.NODES)
    return reasons


def test_an_overflowed_ring_is_noticed(setup: Setup) -> None:
    driver, shadow = Driver(setup, seed=2, capacity=64), Shadow()
    while driver.records.next_seq <= 64:
        driver.step()
    new, lost = driver.records.since(shadow.seq)
    assert lost == driver.records.next_seq - 64
    assert len(new) == 64
    with pytest.raises(CannotFollow, match="comes where 0 should"):
        shadow.apply(new[0])


def slices(driver: Driver, steps: int) -> Iterator[Slice]:
    """A snapshot that is taken while the cache goes on."""
    for part in snapshot(driver.cache.forest, driver.records, nodes=driver.random.randrange(1, 5)):
        yield part
        for _ in range(steps):
            driver.step()


def test_a_snapshot_taken_between_steps_and_the_records_since_are_the_forest(setup: Setup) -> None:
    driver, shadow = Driver(setup, seed=3), Shadow()
    for _ in range(60):
        for _ in range(driver.random.randrange(30)):
            driver.step()
        shadow.load(slices(driver, driver.random.randrange(12)))
        for _ in range(3):
            follow(shadow, driver.records)
            assert of_shadow(shadow) == of_forest(driver.cache)
            driver.step()
