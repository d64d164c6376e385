"""Which sequences run in the next step, and with how many tokens.

Every step first gives each decoding sequence its one token, then continues prompts that are under
way, then admits waiting requests, all under one token budget. Pages for a whole prompt are reserved
at admission; while decoding a sequence grows page by page. When no page is left, the youngest
sequence whose pages its tenant may have is preempted: its pages stay in the cache as long as they
can, and it starts over from the front of the queue.

A sequence that was preempted `MAX_PREEMPTIONS` times is *protected* from then on: it is preempted
no more. Protected sequences run together only as far as the pool could hold all of them at their
longest beside what other tenants keep, so that preempting the others always gives them the page
they need. They take turns by arrival, whatever comes behind them; and so every request ends.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ktserve.cache.manager import CacheManager
from ktserve.engine.sequence import Sequence
from ktserve.messages import RequestFailed
from ktserve.tokens import TOKEN_BYTES, common_prefix

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
        failures: of queued requests that cannot run any more; whoever tells the clients empties it.
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
        self.failures: list[RequestFailed] = []
        self._cache = cache
        self._limits = limits
        self._clock = clock

    @property
    def busy(self) -> bool:
        """Whether there is anything to run or to wait for."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence, *, limited: bool = True) -> RequestFailed | None:
        """Queue ``sequence``, or say why it cannot be served.

        Args:
            limited: the limit of the queue is for it, too.
        """
        if (refusal := self._too_long(sequence)) is not None:
            return refusal
        # Those that the next step can take are not waiting yet. Those that ran already are: where
        # many are preempted, they would otherwise become more and more.
        slots = self._limits.max_running - len(self.running)
        if limited and len(self.waiting) - slots >= self._limits.max_queued:
            return RequestFailed(
                request_id=sequence.request.request_id,
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
        table, sequence.table = sequence.table, None
        if table is not None:
            self.running.remove(sequence)
            self._cache.close(table, sequence.written())
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def abandon(self) -> list[Sequence]:
        """Take out all that hold pages, and keep nothing of what they computed."""
        holding = [one for one in (*self.running, *self.waiting) if one.table is not None]
        for sequence in holding:
            table, sequence.table = sequence.table, None
            (self.running if sequence in self.running else self.waiting).remove(sequence)
            if table is not None:
                self._cache.close(table, b"")
        return holding

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
        full: set[str] = set()
        promises = _Promises(self._cache, self.running)
        for sequence in self._candidates():
            if prefill <= 0 or len(self.running) >= self._limits.max_running:
                break
            tenant = sequence.request.namespace.tenant
            if (refusal := self._too_long(sequence)) is not None:
                # The tenant's part became smaller while it waited.
                self.waiting.remove(sequence)
                self.failures.append(refusal)
                continue
            # These wait for another sequence, or for their own tenant's pages, not for a place:
            # those behind them may go on.
            if not promises.keep(sequence) or tenant in full or self._would_repeat_work(sequence):
                continue
            lacking = self._open(sequence)
            if lacking == "pool":
                break  # in order: nobody overtakes it to the pages that it waits for
            if lacking == "own":
                full.add(tenant)
                continue
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
        return self._peek(sequence)[0]

    def _peek(self, sequence: Sequence) -> tuple[int, int]:
        if not sequence.request.cache.lookup:
            return 0, 0
        return self._cache.peek(sequence.request.namespace, bytes(sequence.tokens))

    def _too_long(self, sequence: Sequence) -> RequestFailed | None:
        """Why ``sequence`` can never run, if it cannot."""
        request = sequence.request
        tenant = request.namespace.tenant
        most = self._cache.capacity(tenant) * self._cache.page_size
        if self._cache.pages_for(sequence.longest) * self._cache.page_size <= most:
            return None
        if most == 0:
            return RequestFailed(
                request_id=request.request_id,
                status=503,
                code="no_share",
                message="the tenant has no part of the page pool: the server does not know it yet,"
                " or its quota is nothing. Whoever runs the server can restart it",
            )
        total = self._cache.pool.total * self._cache.page_size
        whose = "the page pool holds" if most == total else "of the page pool the tenant can get"
        return RequestFailed(
            request_id=request.request_id,
            status=400,
            code="exceeds_pool",
            message=f"{sequence.prompt_tokens} prompt tokens and max_tokens"
            f" {request.sampling.max_tokens} make {sequence.longest}; {whose} {most} tokens."
            " Shorten the prompt or lower max_tokens",
        )

    def _would_repeat_work(self, sequence: Sequence) -> bool:
        """Whether a running prompt of the same namespace is about to compute what this one needs.

        Two equal cold prompts that come together are so computed once.
        """
        if not self._cache.enabled or not sequence.request.cache.lookup:
            return False
        page_size = self._cache.page_size
        namespace = sequence.request.namespace
        matched: int | None = None
        for other in self.running:
            if other.computed >= other.prompt_tokens or other.request.namespace != namespace:
                continue
            if not other.request.cache.insert:
                continue
            limit = min(len(sequence.tokens) - TOKEN_BYTES, len(other.request.prompt))
            common = common_prefix(sequence.tokens, 0, other.request.prompt, 0, limit)
            if matched is None:
                matched = self._matched(sequence) * page_size
            saved = common // TOKEN_BYTES // page_size * page_size - matched
            if saved >= min(SHARED_PREFILL_TOKENS, (sequence.length - matched) / 2):
                return True
        return False

    def _open(self, sequence: Sequence) -> Literal["own", "pool"] | None:
        """Give ``sequence`` its cached prefix and pages for the rest of its prompt.

        Returns:
            None, or of what too little is left: the pool, or its own tenant's part of it.
        """
        cache = self._cache
        request = sequence.request
        tenant = request.namespace.tenant
        running = len(self.running)
        mine = sum(one.request.namespace.tenant == tenant for one in self.running)
        while True:
            matched, locked = self._peek(sequence)
            need = cache.pages_for(sequence.length) - matched + locked
            room = cache.rooms(tenant)
            # Also a page for each running sequence, or the next step would preempt one.
            own = need + mine > room.own
            if own:
                waits = mine > 0
            elif need + (mine if cache.partitioned else running) <= room.pool:
                break
            elif cache.partitioned:
                # Others hold more than quotas of now allow them.
                waits = any(cache.may_take(tenant, one) for one in self._tenants_running())
            else:
                waits = running > 0
            if waits or not cache.yield_pin(tenant, own=own):
                return "own" if own or cache.partitioned else "pool"
        table = cache.open(
            request.namespace,
            bytes(sequence.tokens),
            request=request.request_id,
            insert=request.cache.insert,
            lookup=request.cache.lookup,
            priority=request.cache.priority,
            first=sequence.cached_tokens is None,
        )
        sequence.table = table
        if not cache.grow(table, sequence.length):
            raise RuntimeError("the cache has less room than it said")
        sequence.computed = table.cached_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = table.cached_tokens
            sequence.reason = table.reason
        return None

    def _make_room(self, sequence: Sequence) -> bool:
        """A page for the next token of ``sequence``.

        Preempts the youngest that is not protected and whose pages its tenant may have, again and
        again; that can be itself. Pins give way only where it would otherwise wait for nobody.
        """
        tenant = sequence.request.namespace.tenant
        while sequence.table is not None:
            if self._cache.grow(sequence.table, sequence.length):
                return True
            victims = (
                one
                for one in reversed(self.running)
                if not _protected(one)
                and self._cache.may_take(tenant, one.request.namespace.tenant)
            )
            victim = next(victims, None)
            alone = victim is None or (victim is sequence and len(self.running) == 1)
            own = self._cache.rooms(tenant).own <= 0
            if alone and self._cache.yield_pin(tenant, own=own):
                continue
            if victim is None:
                # Its tenant's part became smaller than what it was promised.
                self._preempt(sequence)
                break
            self._preempt(victim)
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        # In front of those that never ran, and behind older ones that did.
        older = itertools.takewhile(
            lambda one: one.preemptions > 0 and one.arrival <= sequence.arrival, self.waiting
        )
        self.waiting.insert(sum(1 for _ in older), sequence)

    def _tenants_running(self) -> set[str]:
        return {one.request.namespace.tenant for one in self.running}


class _Promises:
    """Pages that the protected sequences come to have at their longest, those that run first.

    Each is promised them as long as the pool could hold them all. Who has to wait keeps its turn:
    the tenant's younger ones wait behind it, and everybody's where it is the pool that is full.
    """

    def __init__(self, cache: CacheManager, running: Iterable[Sequence]) -> None:
        self._cache = cache
        self._needs: Counter[str] = Counter()
        self._waiting: set[str] = set()
        self._full = False
        for sequence in filter(_protected, running):
            self._needs[sequence.request.namespace.tenant] += cache.pages_for(sequence.longest)

    def keep(self, sequence: Sequence) -> bool:
        """Promise ``sequence`` its pages; False where it must wait. Others are promised nothing."""
        if not _protected(sequence):
            return True
        tenant = sequence.request.namespace.tenant
        if self._full or tenant in self._waiting:
            return False
        needs = self._needs.copy()
        needs[tenant] += self._cache.pages_for(sequence.longest)
        if not self._cache.fit_together({tenant: needs[tenant]}):
            self._waiting.add(tenant)
            return False
        # In a partitioned pool the parts are all that counts.
        if not self._cache.partitioned and not self._cache.fit_together(needs):
            self._full = True
            return False
        self._needs = needs
        return True


def _protected(sequence: Sequence) -> bool:
    return sequence.preemptions >= MAX_PREEMPTIONS


def _first(sequence: Sequence, late: float) -> bool:
    """Whether nobody may overtake ``sequence``: it ran already, or came before ``late``."""
    return sequence.preemptions > 0 or sequence.arrival < late
