"""Which sequences run in the next step, and with how many tokens.

Every step first gives each decoding sequence its one token, then continues prompts that are under
way, then admits waiting requests, all under one token budget. Pages for a whole prompt are reserved
at admission; while decoding a sequence grows page by page. When no page is left, the youngest
sequence is preempted: its pages stay in the cache as long as they can, and it starts over from the
front of the queue.

A sequence that was preempted `MAX_PREEMPTIONS` times is *protected* from then on: it is preempted
no more. Protected sequences run together only as far as the pool could hold all of them at their
longest, so that preempting the others always gives them the page they need; and so every request
ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ktserve.cache import CacheManager
from ktserve.cache.forest import common_prefix
from ktserve.engine.sequence import Sequence
from ktserve.messages import RequestFailed
from ktserve.tokens import TOKEN_BYTES

MAX_PREEMPTIONS = 3

LPM_WINDOW = 128
"""Waiting requests that "lpm" compares; a lookup for each of thousands would cost a step's time."""

LPM_PATIENCE = 2.0
"""Seconds after which "lpm" lets nobody overtake a request any more."""

SHARED_PREFILL_TOKENS = 64
"""A prompt waits for an equal start that another one is computing if it so saves this many tokens,
or half of its own work."""


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Attributes:
    max_running: sequences in a step.
    max_queued: requests that wait.
    max_batched_tokens: tokens of a step.
    prefill_tokens: prompt tokens of a step.
    policy: the order of admission.
    """

    max_running: int
    max_queued: int
    max_batched_tokens: int
    prefill_tokens: int
    policy: Literal["fcfs", "lpm"]


class Scheduled(NamedTuple):
    """A sequence's part in a step: its next ``tokens`` tokens are computed.

    Attributes:
        samples: they are its last ones, so that a new token follows.
    """

    sequence: Sequence
    tokens: int
    samples: bool


class Batch(NamedTuple):
    """One step.

    Attributes:
        parts: at least one, each of another sequence.
        admitted: the sequences among them that were just admitted.
    """

    parts: list[Scheduled]
    admitted: list[Sequence]


class Scheduler:
    """The queue and the running set.

    Attributes:
        running: in order of admission.
        waiting: in order of arrival, preempted ones first.
        preemptions: so far.
    """

    def __init__(
        self,
        cache: CacheManager,
        limits: SchedulerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self._cache = cache
        self._limits = limits
        self._clock = clock

    @property
    def busy(self) -> bool:
        """Whether there is anything to run or to wait for."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> RequestFailed | None:
        """Queue ``sequence``, or say why it cannot be served."""
        request_id = sequence.request.request_id
        pool_tokens = self._cache.pool.total * self._cache.page_size
        if sequence.longest > pool_tokens:
            return RequestFailed(
                request_id=request_id,
                status=400,
                code="exceeds_pool",
                message=f"{sequence.prompt_tokens} prompt tokens and max_tokens"
                f" {sequence.request.sampling.max_tokens} make {sequence.longest}; the page pool"
                f" holds {pool_tokens} tokens. Shorten the prompt or lower max_tokens",
            )
        # Those that the next step can take are not waiting yet, nor are those that ran already.
        slots = self._limits.max_running - len(self.running)
        queued = sum(not one.preemptions for one in self.waiting)
        if queued - slots >= self._limits.max_queued:
            return RequestFailed(
                request_id=request_id,
                status=429,
                code="queue_full",
                message=f"{self._limits.max_queued} requests are waiting already, the limit"
                " (max_queued_requests); try again later",
                retry_after=1,
            )
        self.waiting.append(sequence)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Take ``sequence`` out, whatever its state. The one way out.

        What it computed stays in the cache; its other pages are given back.
        """
        if sequence.table is not None:
            self._cache.close(sequence.table, sequence.written())
            sequence.table = None
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def next_batch(self) -> Batch | None:
        """The next step, its pages reserved; None where nothing can run."""
        budget = self._limits.max_batched_tokens
        parts: list[Scheduled] = []
        for sequence in list(self.running):
            if sequence.table is None or sequence.remaining != 1 or budget == 0:
                continue
            if self._make_room(sequence):
                parts.append(Scheduled(sequence, 1, samples=True))
                budget -= 1
        # A protected sequence may have preempted one that was scheduled before it.
        parts = [part for part in parts if part.sequence.table is not None]
        prefill = min(budget, self._limits.prefill_tokens)
        for sequence in self.running:
            if sequence.remaining > 1 and prefill > 0:
                prefill -= self._schedule_prompt(sequence, prefill, parts)
        admitted = self._admit(prefill, parts)
        return Batch(parts, admitted) if parts else None

    def computed(self, batch: Batch) -> None:
        """Note that the model ran ``batch``, and share the finished parts of prompts."""
        for part in batch.parts:
            sequence = part.sequence
            assert sequence.table is not None
            sequence.computed += part.tokens
            # What is generated joins the cache when the sequence ends; a prompt's parts at once,
            # so that equal prompts behind it find them.
            if sequence.computed - part.tokens < sequence.prompt_tokens:
                prompt = min(sequence.computed, sequence.prompt_tokens) * TOKEN_BYTES
                self._cache.commit(sequence.table, bytes(sequence.tokens[:prompt]))

    def _schedule_prompt(self, sequence: Sequence, most: int, parts: list[Scheduled]) -> int:
        tokens = min(sequence.remaining, most)
        parts.append(Scheduled(sequence, tokens, samples=tokens == sequence.remaining))
        return tokens

    def _admit(self, prefill: int, parts: list[Scheduled]) -> list[Sequence]:
        admitted: list[Sequence] = []
        if prefill <= 0 or len(self.running) >= self._limits.max_running:
            return admitted
        for sequence in self._candidates():
            if prefill <= 0 or len(self.running) >= self._limits.max_running:
                break
            # These wait for another sequence, not for a place: those behind them may go on.
            if self._would_repeat_work(sequence) or not self._protectable(sequence):
                continue
            if not self._open(sequence):
                break  # in order: nobody overtakes it to the pages that it waits for
            self.waiting.remove(sequence)
            self.running.append(sequence)
            admitted.append(sequence)
            prefill -= self._schedule_prompt(sequence, prefill, parts)
        return admitted

    def _candidates(self) -> list[Sequence]:
        if self._limits.policy == "fcfs" or len(self.waiting) < 2:
            return list(self.waiting)
        waiting = list(self.waiting)
        window = waiting[:LPM_WINDOW]
        late = self._clock() - LPM_PATIENCE

        # A stable sort: those that may not be overtaken, and equal matches, keep their order.
        def rank(one: Sequence) -> int:
            return -self._cache.pool.total if _first(one, late) else -self._matched(one)

        window.sort(key=rank)
        return window + waiting[LPM_WINDOW:]

    def _matched(self, sequence: Sequence) -> int:
        return self._cache.peek(sequence.request.namespace, bytes(sequence.tokens))[0]

    def _would_repeat_work(self, sequence: Sequence) -> bool:
        """Whether a running prompt of the same namespace is about to compute what this one needs.

        Two equal cold prompts that come together are so computed once.
        """
        if not self._cache.enabled:
            return False
        page_size = self._cache.page_size
        namespace = sequence.request.namespace
        matched: int | None = None
        for other in self.running:
            if other.computed >= other.prompt_tokens or other.request.namespace != namespace:
                continue
            limit = min(len(sequence.tokens) - TOKEN_BYTES, len(other.request.prompt))
            common = common_prefix(sequence.tokens, 0, other.request.prompt, 0, limit)
            if matched is None:
                matched = self._matched(sequence) * page_size
            saved = common // TOKEN_BYTES // page_size * page_size - matched
            if saved >= min(SHARED_PREFILL_TOKENS, (sequence.length - matched) / 2):
                return True
        return False

    def _protectable(self, sequence: Sequence) -> bool:
        """Whether the pool could hold ``sequence``, if protected, beside the protected that run."""
        if not _protected(sequence):
            return True
        together = [one for one in self.running if _protected(one)] + [sequence]
        need = sum(self._cache.pages_for(one.longest) for one in together)
        return need <= self._cache.pool.total

    def _open(self, sequence: Sequence) -> bool:
        """Give ``sequence`` its cached prefix and pages for the rest of its prompt."""
        cache = self._cache
        request = sequence.request
        tokens = bytes(sequence.tokens)
        matched, locked = cache.peek(request.namespace, tokens)
        # Also a page for each running sequence, or the next step would preempt one.
        need = cache.pages_for(sequence.length) - matched + len(self.running)
        # What the lease would lock can be counted too high (see peek); an idle engine just tries.
        if self.running and need + locked > cache.available:
            return False
        table = cache.open(request.namespace, tokens)
        if not cache.grow(table, sequence.length):
            cache.close(table, b"")
            return False
        sequence.table = table
        sequence.computed = table.cached_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = table.cached_tokens
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """A page for the next token of ``sequence``.

        Preempts the youngest that is not protected, again and again; that can be itself.
        """
        while sequence.table is not None:
            if self._cache.grow(sequence.table, sequence.length):
                return True
            self._preempt(next(one for one in reversed(self.running) if not _protected(one)))
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)


def _protected(sequence: Sequence) -> bool:
    return sequence.preemptions >= MAX_PREEMPTIONS


def _first(sequence: Sequence, late: float) -> bool:
    """Whether nobody may overtake ``sequence``: it ran already, or came before ``late``."""
    return sequence.preemptions > 0 or sequence.arrival < late
