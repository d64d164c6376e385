"""The digest agrees with a right copy at every point, and with no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_driver import SETUPS, Driver, Setup

from ktserve.cache.digest import ForestCursor, difference, totals
from ktserve.cache.shadow import Shadow, ShadowNode
from ktserve.cache.snapshot import snapshot

CHANGES: dict[str, Callable[[ShadowNode], None]] = {
    "tokens": lambda node: setattr(node, "tokens", node.tokens + 1),
    "locks": lambda node: setattr(node, "locks", node.locks + 1),
    "hits": lambda node: setattr(node, "hits", node.hits + 1),
    "last_used": lambda node: setattr(node, "last_used", node.last_used + 1),
    "created": lambda node: setattr(node, "created", node.created + 1),
    "parent": lambda node: setattr(node, "parent", ShadowNode(-1, node.tree, None, 0, 0)),
    "children": lambda node: setattr(node, "children", {**node.children, -1: node}),
}


def caught_up(driver: Driver, shadow: Shadow) -> None:
    for record in driver.records.since(shadow.seq)[0]:
        shadow.apply(record)


def compared(driver: Driver, shadow: Shadow, cursor: ForestCursor, most: int) -> str | None:
    ids, digest = cursor.take(most)
    return difference(shadow, totals(driver.cache.forest), ids, digest)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"{s.sharing}-{s.policy}-page{s.page_size}")
def test_a_right_copy_agrees_at_every_point(setup: Setup) -> None:
    driver, shadow = Driver(setup, seed=5), Shadow()
    cursor = ForestCursor(driver.cache.forest)
    for _ in range(1500):
        driver.step()
        caught_up(driver, shadow)
        assert compared(driver, shadow, cursor, driver.random.randrange(1, 6)) is None


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_one_wrong_number_of_one_node_is_found_in_a_round(
    change: Callable[[ShadowNode], None],
) -> None:
    driver, shadow = Driver(SETUPS[0], seed=6), Shadow()
    while len(list(driver.cache.forest.trees())) < 3:
        driver.step()
    shadow.load(list(snapshot(driver.cache.forest, driver.records)))
    cursor = ForestCursor(driver.cache.forest)
    count = len(shadow.nodes)
    assert all(compared(driver, shadow, cursor, 2) is None for _ in range(count))
    change(driver.random.choice([node for node in shadow.nodes.values() if node.parent]))
    assert any(compared(driver, shadow, cursor, 2) is not None for _ in range(count))


def test_wrong_totals_are_told_by_name() -> None:
    driver, shadow = Driver(SETUPS[0], seed=7), Shadow()
    while not driver.cache.accounts.resident:
        driver.step()
    shadow.load(list(snapshot(driver.cache.forest, driver.records)))
    next(iter(shadow.trees.values())).leases += 1
    found = compared(driver, shadow, ForestCursor(driver.cache.forest), 2)
    assert found is not None
    assert found.startswith("leases ")
