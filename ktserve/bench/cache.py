"""The prefix cache alone, without a model: what its operations cost, in microseconds.

Every operation is timed by itself on a forest of a given size, and the median of its repetitions is
the figure: a collection or an interrupt in between does not count, its greatest value shows it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from ktserve.bench.workloads import Figure
from ktserve.cache import CacheManager, PagePool
from ktserve.cache.pool import PageIds
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import TOKEN_BYTES

TURN_TOKENS = 256
"""By how much a conversation grows at a time."""

FILLER_PAGES = 8
"""Pages of each prompt that only fills the forest."""

EVICTED_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is measured.

    Attributes:
        nodes: prompts that fill the forest before anything is timed, each a node of its own.
        page_size: tokens a page.
        namespaces: over which the filling is spread.
        prompt_tokens: lengths of the prompts that are timed.
        repetitions: of each operation.
    """

    nodes: int = 100_000
    page_size: int = 16
    namespaces: int = 1
    prompt_tokens: tuple[int, ...] = (512, 8192, 131_072)
    repetitions: int = 50


def measure(shape: Shape, progress: Callable[[str], None]) -> Iterator[Figure]:
    """Fill a forest and time its operations: a figure for each repetition of each of them."""
    progress(f"filling the forest with {shape.nodes:,} nodes")
    bench = _Bench(shape)
    for tokens in shape.prompt_tokens:
        progress(f"prompts of {tokens:,} tokens")
        yield from bench.prompts(tokens)
    progress("eviction")
    yield from bench.evictions()


class _Bench:
    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._random = np.random.default_rng(0)
        self._namespaces = [
            Namespace(tenant="bench", cache_salt=f"salt-{n}", extra_key=None, adapter=None)
            for n in range(shape.namespaces)
        ]
        longest = max(shape.prompt_tokens) // shape.page_size
        room = shape.nodes * FILLER_PAGES + 3 * (shape.repetitions + 2) * longest
        self._cache = CacheManager(PagePool(room), shape.page_size)
        for namespace in itertools.islice(itertools.cycle(self._namespaces), shape.nodes):
            self._insert(namespace, self._tokens(FILLER_PAGES * shape.page_size))

    def prompts(self, tokens: int) -> Iterator[Figure]:
        """Every operation on prompts of ``tokens`` tokens."""
        pages = tokens // self._shape.page_size
        namespace = self._namespaces[0]
        forest = self._cache.forest
        whole, grown = self._tokens(tokens), self._tokens(tokens)
        self._insert(namespace, whole)
        for end in range(TURN_TOKENS, tokens + 1, TURN_TOKENS):
            self._insert(namespace, grown[: end * TOKEN_BYTES])
        for lies, prompt in (("one edge", whole), ("grown", grown)):
            for _ in range(self._shape.repetitions):
                with _timed(f"lookup, {tokens:,} tokens, {lies}") as looked_up:
                    forest.peek(namespace, prompt, pages)
                yield looked_up.figure
                with _timed(f"lease and release, {tokens:,} tokens, {lies}") as leased:
                    forest.release(forest.match(namespace, prompt, pages)[0])
                yield leased.figure
        for _ in range(self._shape.repetitions):
            prompt = self._tokens(tokens)
            lease, _ = forest.match(namespace, prompt, pages)
            own = self._take(pages)
            with _timed(f"insert, {tokens:,} tokens") as inserted:
                forest.extend(lease, prompt, own)
            yield inserted.figure
            forest.release(lease)
            with _timed(f"split, {tokens:,} tokens") as split:
                lease, _ = forest.match(namespace, prompt, pages // 2)
            yield split.figure
            forest.release(lease)

    def evictions(self) -> Iterator[Figure]:
        """Giving up a few pages of a full forest; they go back to the pool untimed."""
        count = -(-EVICTED_TOKENS // self._shape.page_size)
        for _ in range(self._shape.repetitions):
            with _timed(f"evict {EVICTED_TOKENS} tokens") as evicted:
                pages = self._cache.forest.evict(count)
            yield evicted.figure
            self._cache.pool.give_back(pages)

    def _insert(self, namespace: Namespace, prompt: bytes) -> None:
        pages = len(prompt) // TOKEN_BYTES // self._shape.page_size
        table = self._cache.open(namespace, prompt)
        self._cache.grow(table, pages * self._shape.page_size)
        self._cache.close(table, prompt)

    def _take(self, pages: int) -> PageIds:
        missing = pages - self._cache.pool.free
        if missing > 0:
            self._cache.pool.give_back(self._cache.forest.evict(missing))
        return self._cache.pool.take(pages)

    def _tokens(self, count: int) -> bytes:
        return self._random.integers(0, 50_000, count, dtype=np.int32).tobytes()


class _timed:
    """Times the block under it; `figure` is there once it has ended."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._began
        self.figure = Figure(self._name, seconds * 1e6, "us", "less")
