"""From requests to pieces of text: what the engine's tokens say, and where each text ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from ktserve.api.detokenizer import Detokenizer, TokenBytes
from ktserve.api.engine_client import EngineError
from ktserve.api.stopping import StopStrings
from ktserve.api.tenant_totals import TenantTotals
from ktserve.messages import EngineInfo, EngineStats, Request, TokenLogprobs, TokenOutput

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot say; OpenAI's value."""


class Engine(Protocol):
    """What the routes need of the engine; `ktserve.api.engine_client.EngineClient` is it."""

    @property
    def info(self) -> EngineInfo | None:
        """None while no engine is ready."""

    @property
    def stats(self) -> EngineStats | None:
        """The newest counters, if there are any."""

    @property
    def tenants(self) -> TenantTotals:
        """The tenants' counters, over all lives of the engine."""

    def next_request_id(self) -> int:
        """An id that no request had before."""

    def stream(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """The outputs of ``request``; closing it early aborts the request."""


@dataclass(frozen=True)
class Job:
    """One choice to generate.

    Attributes:
        prompt: which of the request's prompts it continues.
        stops: the stop strings.
    """

    request: Request
    prompt: int
    stops: tuple[str, ...]


@dataclass(frozen=True)
class TokenReport:
    """One generated token with its log-probabilities.

    Attributes:
        offset: characters of the text that were complete before it.
    """

    token_id: int
    offset: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """What a step adds to one choice.

    Attributes:
        choice: its place among the request's jobs.
        text: characters that are final; often empty while something waits.
        reports: of the tokens since the last piece with reports, where asked for.
        tokens: tokens that the step generated.
        cached_tokens: tokens of the prompt that came from the cache.
        finish: why the text ended, on its last piece.
    """

    choice: int
    text: str
    reports: tuple[TokenReport, ...]
    tokens: int
    cached_tokens: int
    finish: str | None


@dataclass
class Text:
    """The text of one choice as its outputs come in."""

    job: Job
    table: TokenBytes
    choice: int
    cached_tokens: int = 0
    _tokens: int = 0
    _length: int = 0
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.table)
        self._stops = StopStrings(self.job.stops)

    def take(self, output: TokenOutput) -> Piece:
        """What ``output`` adds.

        A stop string ends the text before it, and the tokens after the one that completed it do
        not count.
        """
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        text, reports, finish, taken = "", [], None, 0
        for place, token_id in enumerate(output.token_ids):
            is_last = output.finish is not None and place == len(output.token_ids) - 1
            self._tokens += 1
            taken += 1
            if output.logprobs is not None:
                reports.append(_report(token_id, self._length, output.logprobs[place]))
            shown, stopped = self._push(token_id, is_last, is_last and output.stopped_by_token)
            text += shown
            if stopped:
                finish = "stop"
                break
        if finish is None and output.finish is not None:
            text += self._stops.finish()
            finish = output.finish
        return Piece(self.choice, text, tuple(reports), taken, self.cached_tokens, finish)

    def _push(self, token_id: int, is_last: bool, is_hidden: bool) -> tuple[str, bool]:
        text = "" if is_hidden else self._detokenizer.push(token_id)
        if is_last:
            text += self._detokenizer.finish()
        self._length += len(text)
        may_stop = self._tokens > self.job.request.sampling.min_tokens
        return self._stops.push(text, may_stop=may_stop)


async def generate(
    engine: Engine, table: TokenBytes, jobs: Sequence[Job]
) -> AsyncGenerator[Piece, None]:
    """The pieces of all ``jobs`` as they come; ends when every job has finished.

    Closing it early, or the failure of one job, ends the others at once in the engine too.

    Raises:
        EngineError: a job failed.
    """
    if len(jobs) == 1:
        pieces = _one(engine, Text(jobs[0], table, 0))
    else:
        pieces = _several(engine, [Text(job, table, place) for place, job in enumerate(jobs)])
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece


async def _one(engine: Engine, text: Text) -> AsyncGenerator[Piece, None]:
    outputs = engine.stream(text.job.request)
    async with aclosing(outputs):
        async for output in outputs:
            piece = text.take(output)
            if piece.finish is not None:
                # A reader of the last piece may take its time: the engine should not.
                await outputs.aclose()
            yield piece
            if piece.finish is not None:
                return
    raise EngineError(500, "engine_protocol", "the engine ended the request without a reason", None)


async def _several(engine: Engine, texts: Sequence[Text]) -> AsyncGenerator[Piece, None]:
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    async def pump(text: Text) -> None:
        try:
            pieces = _one(engine, text)
            async with aclosing(pieces):
                async for piece in pieces:
                    queue.put_nowait(piece)
        except Exception as error:  # raised where the pieces are read
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(text)) for text in texts]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finish is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(token_id: int, offset: int, logprobs: TokenLogprobs) -> TokenReport:
    return TokenReport(
        token_id=token_id,
        offset=offset,
        logprob=_finite(logprobs.logprob),
        top=tuple((other, _finite(value)) for other, value in logprobs.top),
    )


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
