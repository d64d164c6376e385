"""Why a lookup found what it found, from where its walk ended."""

from __future__ import annotations

import itertools

from ktserve.cache.node import Node, Place
from ktserve.cache.reasons import By, Reason
from ktserve.cache.records import Why
from ktserve.tokens import TOKEN_BYTES, common_prefix

SIBLINGS_COMPARED = 8
"""Edges that are looked at to say where within a page a prompt went another way."""

_SECOND = 1_000_000_000


def explain(
    place: Place, begin: int, tokens: bytes, max_pages: int, page_size: int, tick: int
) -> Reason:
    """The reason of a lookup of ``tokens`` that ended at ``place``.

    Args:
        begin: the byte where the root stands from which it went: behind a public prefix, or 0.
        max_pages: at which it would have ended anyway.
        page_size: tokens a page.
        tick: now.
    """
    node, at, child, common = place
    page_bytes = page_size * TOKEN_BYTES
    end = at + common
    last = end // page_bytes * page_bytes
    found = last // TOKEN_BYTES
    if end < min(len(tokens) // page_bytes, max_pages) * page_bytes:
        page = tokens[last : last + page_bytes]
        above = node if child is None else child
        ghost = node.tree.account.ghosts.find(above, (last - begin) // page_bytes, page)
        if ghost is not None:
            seconds = (tick - ghost.tick) / _SECOND
            by = _by(ghost.why)
            return Reason(kind="evicted", tokens=found, at=found, seconds=seconds, by=by)
        if child is None and node.children:
            end += _shared_start(node, page)
        if end and (child is not None or node.children):
            return Reason(kind="diverged", tokens=found, at=end // TOKEN_BYTES)
    return Reason(kind="hit", tokens=found) if found else Reason(kind="cold")


def _shared_start(node: Node, page: bytes) -> int:
    """How many bytes of ``page``, whole tokens, begin an edge below ``node`` as well.

    Looks at a few edges only: this is for an explanation.
    """
    best = 0
    token = page[:TOKEN_BYTES]
    for child in itertools.islice(node.children.values(), SIBLINGS_COMPARED):
        if child.key.startswith(token):
            best = max(best, common_prefix(page, 0, child.key, 0, len(page)))
    return best


def _by(why: int) -> By:
    if why == Why.OWN:
        return "own"
    return "other" if why == Why.OTHER else "system"
