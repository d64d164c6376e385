"""What is measured: three workloads, each giving figures from one run against one server."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ktserve.bench.prompts import Sizing, fresh, text
from ktserve.bench.target import Prompt, RequestFailed, Sample, Target

Unit = Literal["s", "us", "tokens/s", "share", "tokens", "bytes/node"]
Better = Literal["less", "more", "neither"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of every workload. Tokens are aims; reports give what the server counted.

    Attributes:
        prompt_tokens: of a prompt whose first token is timed.
        first_tokens: how many such prompts a run times, each cold and then warm.
        concurrency: requests at once, one decode workload for each.
        output_tokens: that each decoding request gives.
        decode_prompt_tokens: short, so that little else than decoding is timed.
        systems, users: the shared workload has a request of each user to each system prompt.
        shared_at_once: its requests at once.
    """

    prompt_tokens: int = 444
    first_tokens: int = 5
    concurrency: tuple[int, ...] = (1, 4, 16)
    output_tokens: int = 64
    decode_prompt_tokens: int = 48
    systems: int = 8
    users: int = 8
    system_tokens: int = 800
    question_tokens: int = 50
    shared_output_tokens: int = 32
    shared_at_once: int = 8


@dataclass(frozen=True)
class Figure:
    """One figure of one run."""

    name: str
    value: float
    unit: Unit
    better: Better


Failure = Callable[[str], None]
"""Takes note of the reason for which one request failed."""


@dataclass(frozen=True)
class Workload:
    """A named measurement, with prompts that one run draws once for all servers.

    `measure` sends them to a server. It leaves out a figure whose requests did not all succeed.
    """

    name: str
    measure: Callable[[Target, Failure], Awaitable[list[Figure]]]


def time_to_first_token(shape: Shape, sizing: Sizing, rng: random.Random) -> Workload:
    """Seconds to the first token of a prompt that was never seen, and of the same one again.

    The requests go one after the other. The figures are medians over the run's prompts.
    """
    words = sizing.words(shape.prompt_tokens)
    prompts = [fresh(rng, words) for _ in range(shape.first_tokens)]

    async def measure(target: Target, failed: Failure) -> list[Figure]:
        timed: dict[str, list[Sample]] = {"cold": [], "warm": []}
        for prompt in prompts:
            for samples in timed.values():
                samples.extend(await _send(target, [prompt], 1, at_once=1, failed=failed))
        figures = []
        for name, samples in timed.items():
            if len(samples) == len(prompts):
                seconds = statistics.median(sample.time_to_first_token for sample in samples)
                figures.append(Figure(f"ttft {name}", seconds, "s", "less"))
                figures += _prompt_figures(f"ttft {name}", samples)
        return figures

    return Workload("ttft", measure)


def decode(shape: Shape, at_once: int, sizing: Sizing, rng: random.Random) -> Workload:
    """Tokens a second with ``at_once`` requests at once, each with a short prompt of its own.

    A request's rate is its tokens after its first over the time after its first; the figure is the
    sum over the requests. The total counts all tokens over the time from the first request sent to
    the last token.
    """
    words = sizing.words(shape.decode_prompt_tokens)
    prompts = [fresh(rng, words) for _ in range(at_once)]
    name = f"decode x{at_once}"

    async def measure(target: Target, failed: Failure) -> list[Figure]:
        samples = await _send(target, prompts, shape.output_tokens, at_once=at_once, failed=failed)
        if len(samples) < len(prompts):
            return []
        try:
            rate = sum(sample.decode_rate for sample in samples)
        except RequestFailed as error:
            failed(str(error))
            return []
        tokens = sum(sample.output_tokens for sample in samples)
        elapsed = max(sample.last for sample in samples) - min(sample.sent for sample in samples)
        return [
            Figure(name, rate, "tokens/s", "more"),
            Figure(f"{name} total", tokens / elapsed, "tokens/s", "more"),
            Figure(f"{name} output", tokens / len(samples), "tokens", "neither"),
        ]

    return Workload(name, measure)


def shared_prefix(shape: Shape, sizing: Sizing, rng: random.Random) -> Workload:
    """Seconds for every user's question to every system prompt, and the share that was cached.

    The system prompts are new in each run, and the requests come in random order, so that the first
    requests of a system prompt may arrive at once.
    """
    system_words = sizing.words(shape.system_tokens, template=False)
    question_words = sizing.words(shape.question_tokens, template=False)
    systems = [text(rng, system_words) for _ in range(shape.systems)]
    prompts = [
        Prompt(text(rng, question_words), system) for system in systems for _ in range(shape.users)
    ]
    rng.shuffle(prompts)

    async def measure(target: Target, failed: Failure) -> list[Figure]:
        samples = await _send(
            target,
            prompts,
            shape.shared_output_tokens,
            at_once=shape.shared_at_once,
            failed=failed,
        )
        if len(samples) < len(prompts):
            return []
        elapsed = max(sample.last for sample in samples) - min(sample.sent for sample in samples)
        return [Figure("shared", elapsed, "s", "less"), *_prompt_figures("shared", samples)]

    return Workload("shared", measure)


def _prompt_figures(name: str, samples: Sequence[Sample]) -> list[Figure]:
    """Prompt tokens a request as the server counted them, and the share that it had cached.

    A figure is left out where an answer does not report what it needs.
    """
    prompt = [sample.prompt_tokens for sample in samples if sample.prompt_tokens is not None]
    cached = [sample.cached_tokens for sample in samples if sample.cached_tokens is not None]
    if len(prompt) < len(samples) or not sum(prompt):
        return []
    figures = [Figure(f"{name} prompt", sum(prompt) / len(prompt), "tokens", "neither")]
    if len(cached) == len(samples):
        figures.append(Figure(f"{name} cached", sum(cached) / sum(prompt), "share", "more"))
    return figures


async def _send(
    target: Target,
    prompts: Sequence[Prompt],
    output_tokens: int,
    *,
    at_once: int,
    failed: Failure,
) -> list[Sample]:
    """Send every prompt, ``at_once`` at a time, in their order; a sample of each that succeeds."""
    places = asyncio.Semaphore(at_once)

    async def one(prompt: Prompt) -> list[Sample]:
        async with places:
            try:
                return [await target.stream(prompt, output_tokens)]
            except RequestFailed as error:
                failed(str(error))
                return []

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt)) for prompt in prompts]
    return [sample for task in tasks for sample in task.result()]
