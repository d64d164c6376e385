"""The log lines by which operators follow an engine, in the wording that they know."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ktserve.cache.manager import CacheManager
from ktserve.engine.scheduler import Batch, Scheduler
from ktserve.tenancy.encoding import pseudonym

log = logging.getLogger("ktserve.engine")

DECODE_INTERVAL = 40
"""Decode steps from one decode line to the next."""


class StepLog:
    """Writes a line for each step that prefills and for every fortieth that decodes.

    Args:
        pseudonym_key: under which a namespace is named in debug lines.
    """

    def __init__(self, pseudonym_key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = pseudonym_key
        self._clock = clock
        self._steps = 0
        self._tokens = 0
        self._since = clock()

    def scheduled(self, batch: Batch, scheduler: Scheduler, cache: CacheManager) -> None:
        """Note a step that is about to run."""
        prefill = [
            part
            for part in batch.parts
            if part.tokens > 1 or part.sequence.computed < part.sequence.prompt_tokens
        ]
        usage = cache.used / cache.pool.total
        if prefill:
            log.info(
                "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f,"
                " #running-req: %d, #queue-req: %d",
                len(batch.admitted),
                sum(part.tokens for part in prefill),
                sum(one.table.cached_tokens for one in batch.admitted if one.table is not None),
                usage,
                len(scheduler.running) - len(prefill),
                len(scheduler.waiting),
            )
        if log.isEnabledFor(logging.DEBUG):
            for sequence in batch.admitted:
                log.debug(
                    "request %d in %s: %d prompt tokens, %d cached: %s",
                    sequence.request.request_id,
                    pseudonym(sequence.request.namespace, self._key),
                    sequence.prompt_tokens,
                    sequence.cached_tokens,
                    sequence.reason,
                )
        decoding = len(batch.parts) - len(prefill)
        if decoding:
            self._decoded(decoding, usage, scheduler, cache)

    def _decoded(
        self, tokens: int, usage: float, scheduler: Scheduler, cache: CacheManager
    ) -> None:
        now = self._clock()
        if self._steps == 0:
            # The rate is from here on, so that idle time before it does not count.
            self._since = now
        else:
            self._tokens += tokens
        self._steps += 1
        if self._steps < DECODE_INTERVAL:
            return
        log.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f,"
            " gen throughput (token/s): %.2f, #queue-req: %d",
            len(scheduler.running),
            cache.used * cache.page_size,
            usage,
            self._tokens / max(now - self._since, 1e-9),
            len(scheduler.waiting),
        )
        self._steps = self._tokens = 0
