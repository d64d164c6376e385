"""Which of a tenant's pages go first: the policies as the key of an ordered queue.

A policy gives each leaf a number; the leaf with the lowest gives up its last page. Every number
only ever grows while a node lives. It is a rank above an age: most leaves that come into the order
are the last of their rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ktserve.cache.node import Node

EvictionPolicy = Literal["lru", "lfu", "slru", "fifo", "priority"]

RANK_BITS = 64
"""Ticks are nanoseconds and stay below 2^64, so that a count above them decides first."""


def _lru(node: Node) -> int:
    """The one that was not used for longest."""
    return node.last_used


def _lfu(node: Node) -> int:
    """The one with the fewest hits, and of those the least recently used."""
    return (node.hits << RANK_BITS) | node.last_used


def _slru(node: Node) -> int:
    """First those that were never hit, then the others; both least recently used first.

    So one pass over many prompts that never come again takes nothing from those that did.
    """
    return ((node.hits > 0) << RANK_BITS) | node.last_used


def _fifo(node: Node) -> int:
    """The one that came first, however often it was used."""
    return node.created


def _priority(node: Node) -> int:
    """The one with the lowest priority, and of those the least recently used."""
    return (node.priority << RANK_BITS) | node.last_used


POLICIES: dict[EvictionPolicy, Callable[[Node], int]] = {
    "lru": _lru,
    "lfu": _lfu,
    "slru": _slru,
    "fifo": _fifo,
    "priority": _priority,
}
