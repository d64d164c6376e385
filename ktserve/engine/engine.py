"""One step after another: admit, run, sample, answer."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ktserve.cache.manager import CacheManager
from ktserve.engine.admission import why_refused
from ktserve.engine.public import PublicPrefixes
from ktserve.engine.runner import ModelRunner
from ktserve.engine.sampler import Sampled, Sampler
from ktserve.engine.scheduler import Batch, Scheduler
from ktserve.engine.sequence import Sequence
from ktserve.engine.steplog import StepLog
from ktserve.engine.tenant_stats import TenantStats
from ktserve.messages import (
    Abort,
    EngineStats,
    FinishReason,
    PublicPrefix,
    Request,
    RequestFailed,
    StepOutput,
    TenantCache,
    ToEngine,
    TokenLogprobs,
    TokenOutput,
)

log = logging.getLogger("ktserve.engine")

LONGEST_SLEEP_MS = 3_600_000
"""An idle engine looks at times to live once an hour at least: ZeroMQ waits for 24 days at most."""

FAULTS_IN_A_ROW = 3
"""Errors inside the cache with no good step between them after which the engine gives up: what
comes back at once would come back for ever, and a new engine starts empty."""

BREACHES_A_LINE = 1000
"""While the books stay wrong, every so many steps say so again."""


class Engine:
    """The requests of one API process, from their arrival to their last token.

    Knows no sockets: messages go in by `receive`, and each `step` gives what there is to say.

    Args:
        draw_seed: gives the seed of a request that brings none, 63 bits, from its tenant's name.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: CacheManager,
        runner: ModelRunner,
        sampler: Sampler,
        eos_token_ids: tuple[int, ...],
        steplog: StepLog,
        draw_seed: Callable[[str], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._sampler = sampler
        self._eos = frozenset(eos_token_ids)
        self._steplog = steplog
        system = random.SystemRandom()
        self._draw_seed = draw_seed or (lambda _tenant: system.getrandbits(63))
        self._clock = clock
        self._public = PublicPrefixes(cache)
        self._tenants = TenantStats(cache, clock)
        self._sequences: dict[int, Sequence] = {}
        self._outputs: list[TokenOutput | RequestFailed] = []
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._breaches = 0
        self._faults = 0
        self._changed = False

    @property
    def busy(self) -> bool:
        """Whether a step would do anything, telling the new counts among it."""
        return self._scheduler.busy or self._changed

    def receive(self, message: ToEngine) -> None:
        """Take in a request or the end of one."""
        self._changed = True
        with self._surviving():
            match message:
                case Abort():
                    self._end(message.request_id)
                case PublicPrefix():
                    if (request := self._public.register(message)) is not None:
                        self._add(request)
                case Request():
                    self._add(message)

    def abort_all(self) -> None:
        """End every request: nobody waits for them any more."""
        for request_id in list(self._sequences):
            self._end(request_id)
        self._public.forget()
        self._tenants.forget()
        self._outputs.clear()
        self._changed = True

    def step(self) -> StepOutput:
        """Run one step, and say what it and the messages before it have changed."""
        with self._surviving():
            self._run()
        self._check()
        self._changed = False
        outputs, self._outputs = self._outputs, []
        tenants = self._tenants.changed(idle=not self._scheduler.busy)
        return StepOutput(outputs=outputs, stats=self.stats(tenants))

    def _run(self) -> None:
        batch = self._scheduler.next_batch()
        self._tell_failures()
        if batch is None:
            return
        self._steplog.scheduled(batch, self._scheduler, self._cache)
        logits = self._runner.run(batch)
        sampling = [part.sequence for part in batch.parts if part.samples]
        sampled = self._sampler.sample(logits, sampling) if sampling else []
        self._scheduler.computed(batch)
        self._count(batch)
        for sequence, result in zip(sampling, sampled, strict=True):
            self._advance(sequence, result)
        self._faults = 0

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Go on after an error inside the cache, whose books are right again by then.

        What was running is failed: nobody knows how far the step had come.
        """
        repairs = self._cache.repairs
        try:
            yield
        except Exception:
            self._faults += 1
            if self._cache.repairs == repairs or self._faults > FAULTS_IN_A_ROW:
                raise
            log.exception("an error inside the cache; the running requests fail")
            self._changed = True
            for sequence in self._scheduler.abandon():
                self._sequences.pop(sequence.request.request_id, None)
                self._refuse(
                    RequestFailed(
                        request_id=sequence.request.request_id,
                        status=500,
                        code="internal_error",
                        message="the request was cut off by an internal error; send it again",
                    )
                )

    def tidy(self) -> None:
        """Forget namespaces whose time to live is over."""
        with self._surviving():
            if self._cache.expire():
                self._changed = True

    @property
    def idle_ms(self) -> int | None:
        """For how long `tidy` has nothing to do; None: for ever."""
        due = self._cache.next_expiry
        return None if due is None else min(due // 1_000_000 + 1, LONGEST_SLEEP_MS)

    def stats(self, tenants: tuple[TenantCache, ...] = ()) -> EngineStats:
        """Counters and gauges of now, with ``tenants`` among them."""
        return EngineStats(
            running=len(self._scheduler.running),
            queued=len(self._scheduler.waiting),
            pages_total=self._cache.pool.total,
            pages_free=self._cache.pool.free,
            pages_evictable=self._cache.accounts.evictable,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            evicted_tokens=self._cache.accounts.evicted * self._cache.page_size,
            preemptions=self._scheduler.preemptions,
            invariant_breaches=self._breaches + self._cache.repairs,
            tenants=tenants,
        )

    def _add(self, request: Request) -> None:
        if problem := why_refused(request, self._sampler.vocab_size):
            self._refuse(
                RequestFailed(
                    request_id=request.request_id,
                    status=400,
                    code="invalid_request",
                    message=problem,
                )
            )
            return
        seed = request.sampling.seed
        sequence = Sequence(
            request,
            seed=self._draw_seed(request.namespace.tenant) if seed is None else seed,
            arrival=self._clock(),
        )
        # Those of the engine's own are few, and nobody would send them again.
        refusal = self._scheduler.add(sequence, limited=request.request_id > 0)
        if refusal is not None:
            self._refuse(refusal)
            return
        self._sequences[request.request_id] = sequence

    def _tell_failures(self) -> None:
        failures, self._scheduler.failures = self._scheduler.failures, []
        for failure in failures:
            self._sequences.pop(failure.request_id, None)
            self._refuse(failure)

    def _refuse(self, failure: RequestFailed) -> None:
        if failure.request_id < 0:
            self._public.failed(failure.request_id, failure.message)
        else:
            self._outputs.append(failure)

    def _end(self, request_id: int) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def _count(self, batch: Batch) -> None:
        for sequence in batch.admitted:
            if not sequence.preemptions and sequence.request.request_id > 0:
                assert sequence.cached_tokens is not None
                self._prompt_tokens += sequence.prompt_tokens
                self._cached_tokens += sequence.cached_tokens

    def _advance(self, sequence: Sequence, result: Sampled) -> None:
        request_id = sequence.request.request_id
        if request_id < 0:
            self._end(request_id)
            self._public.computed(request_id)
            return
        sequence.append(result.token)
        self._generated_tokens += 1
        finish, by_token = self._finish(sequence, result.token)
        logprobs: list[TokenLogprobs] | None = None
        if result.logprobs is not None:
            logprobs = [result.logprobs]
        self._outputs.append(
            TokenOutput(
                request_id=request_id,
                token_ids=[result.token],
                cached_tokens=None if sequence.announced else sequence.cached_tokens,
                logprobs=logprobs,
                finish=finish,
                stopped_by_token=by_token,
            )
        )
        sequence.announced = True
        if finish is not None:
            self._end(request_id)

    def _finish(self, sequence: Sequence, token: int) -> tuple[FinishReason | None, bool]:
        parameters = sequence.request.sampling
        ends = token in parameters.stop_token_ids or (
            token in self._eos and not parameters.ignore_eos
        )
        if ends:
            return "stop", True
        if sequence.generated >= parameters.max_tokens:
            return "length", False
        return None, False

    def _check(self) -> None:
        """Raise the alarm, not the server, where the books do not add up."""
        if self._cache.balanced():
            return
        self._breaches += 1
        if self._breaches % BREACHES_A_LINE != 1:
            return
        log.error(
            "cache invariant broken (%d times): free %d + resident %d + private %d != total %d",
            self._breaches,
            self._cache.pool.free,
            self._cache.accounts.resident,
            self._cache.accounts.private,
            self._cache.pool.total,
        )
