"""Random operations on the cache against a model of it, with the whole invariant after each."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ktserve.cache import BlockTable, CacheManager, PagePool
from ktserve.cache.audit import audit
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import pack

NAMESPACES = [
    Namespace(tenant="a", cache_salt=None, extra_key=None, adapter=None),
    Namespace(tenant="a", cache_salt="bc", extra_key=None, adapter=None),
    Namespace(tenant="a", cache_salt=None, extra_key="bc", adapter=None),
    Namespace(tenant="ab", cache_salt="c", extra_key=None, adapter=None),
]
# Two token ids and short prompts: prefixes meet, split and diverge all the time.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=16)
running = precondition(lambda self: self.running)


class Sequence:
    def __init__(self, table: BlockTable, tokens: list[int]) -> None:
        self.table = table
        self.tokens = tokens
        self.written = table.cached_tokens


class CacheMachine(RuleBasedStateMachine):
    """Pages hold what was written to them, so a lease on a wrong page is seen at once."""

    @initialize(page_size=st.sampled_from([1, 2, 4]), pages=st.integers(8, 40))
    def start(self, page_size: int, pages: int) -> None:
        self.cache = CacheManager(PagePool(pages), page_size)
        self.running: list[Sequence] = []
        # What each slot holds: the namespace and the whole prefix up to and including its token.
        self.slots: dict[int, tuple[Namespace, tuple[int, ...]]] = {}

    def slot(self, sequence: Sequence, position: int) -> int:
        size = self.cache.page_size
        return int(sequence.table.pages[position // size]) * size + position % size

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts)
    def open(self, namespace: Namespace, tokens: list[int]) -> None:
        prompt = pack(tokens)
        expected, newly = self.cache.peek(namespace, prompt)
        locked = self.cache.accounts.locked
        table = self.cache.open(namespace, prompt)
        assert self.cache.accounts.locked == locked + newly
        assert table.cached_tokens == expected * self.cache.page_size
        assert table.cached_tokens < len(tokens)
        sequence = Sequence(table, tokens)
        for position in range(table.cached_tokens):
            # The positive half and the negative one: the right content, of this namespace alone.
            assert self.slots[self.slot(sequence, position)] == (
                namespace,
                tuple(tokens[: position + 1]),
            )
        self.running.append(sequence)

    @running
    @rule(which=st.integers(0, 99), count=st.integers(1, 8))
    def compute(self, which: int, count: int) -> None:
        self.write(self.running[which % len(self.running)], count)

    @running
    @rule(which=st.integers(0, 99))
    def prefill(self, which: int) -> None:
        """The ordinary case: all of a prompt, then into the forest."""
        sequence = self.running[which % len(self.running)]
        self.write(sequence, len(sequence.tokens))
        self.cache.commit(sequence.table, pack(sequence.tokens[: sequence.written]))

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts)
    def serve(self, namespace: Namespace, tokens: list[int]) -> None:
        """A request from beginning to end."""
        self.open(namespace, tokens)
        self.prefill(-1)
        self.close(-1, keep=True)

    def write(self, sequence: Sequence, count: int) -> None:
        end = min(sequence.written + count, len(sequence.tokens))
        before = sequence.table.length
        available = min(self.cache.rooms(sequence.table.namespace.tenant))
        grown = self.cache.grow(sequence.table, end)
        assert grown == (self.cache.pages_for(end) - before <= available)
        if not grown:
            assert sequence.table.length == before
            return
        for position in range(sequence.written, end):
            self.slots[self.slot(sequence, position)] = (
                sequence.table.namespace,
                tuple(sequence.tokens[: position + 1]),
            )
        sequence.written = end

    @running
    @rule(which=st.integers(0, 99))
    def commit(self, which: int) -> None:
        sequence = self.running[which % len(self.running)]
        self.cache.commit(sequence.table, pack(sequence.tokens[: sequence.written]))

    @running
    @rule(which=st.integers(0, 99), more=st.integers(0, 1))
    def generate(self, which: int, more: int) -> None:
        self.running[which % len(self.running)].tokens.append(more)

    @running
    @rule(which=st.integers(0, 99), keep=st.booleans())
    def close(self, which: int, keep: bool) -> None:
        sequence = self.running.pop(which % len(self.running))
        tokens = pack(sequence.tokens[: sequence.written]) if keep else b""
        self.cache.close(sequence.table, tokens)
        self.cache.close(sequence.table, tokens)

    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def flush(self, namespace: Namespace | None) -> None:
        self.cache.flush(namespace)

    @rule(count=st.integers(1, 6))
    def evict_exactly(self, count: int) -> None:
        evictable = self.cache.accounts.evictable
        taker = self.cache.accounts.of("a")
        pages = np.frombuffer(self.cache.forest.evict(count, taker), dtype=np.int64)
        assert len(pages) == min(count, evictable)
        self.cache.pool.give_back(pages)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        audit(self.cache, [sequence.table for sequence in self.running])
        for sequence in self.running:
            for position in range(sequence.written):
                assert self.slots[self.slot(sequence, position)] == (
                    sequence.table.namespace,
                    tuple(sequence.tokens[: position + 1]),
                )

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in self.running:
            self.cache.close(sequence.table, b"")
        self.cache.flush()
        assert self.cache.pool.free == self.cache.pool.total
        assert list(self.cache.forest.trees()) == []
        assert np.array_equal(np.sort(self.cache.pool.free_ids()), np.arange(self.cache.pool.total))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_life(page_size: int, seed: int) -> None:
    """Long runs reach what short examples do not: deep trees, full pools, crowded prefixes."""
    draw = random.Random(seed)
    machine = CacheMachine()
    machine.start(page_size, draw.randrange(20, 60))
    starts = [[draw.randrange(2) for _ in range(12)] for _ in range(3)]
    for _ in range(1500):
        which = draw.randrange(100)
        namespace = draw.choice(NAMESPACES[:2] if draw.random() < 0.8 else NAMESPACES)
        tokens = draw.choice(starts)[: draw.randrange(1, 13)]
        tokens = tokens + [draw.randrange(2) for _ in range(draw.randrange(6))]
        kind = draw.random()
        if kind < 0.25 and len(machine.running) < 6:
            machine.open(namespace, tokens)
        elif kind < 0.4:
            machine.serve(namespace, tokens)
        elif kind < 0.45:
            machine.evict_exactly(draw.randrange(1, 5))
        elif kind < 0.46:
            machine.flush(draw.choice([None, namespace]))
        elif machine.running and kind < 0.6:
            machine.generate(which, draw.randrange(2))
        elif machine.running and kind < 0.75:
            machine.compute(which, draw.randrange(1, 9))
        elif machine.running and kind < 0.85:
            machine.prefill(which)
        elif machine.running and kind < 0.9:
            machine.commit(which)
        elif machine.running:
            machine.close(which, draw.random() < 0.8)
        machine.everything_adds_up()
    machine.teardown()
