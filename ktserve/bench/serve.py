"""The measurement of one server, or of two side by side, run by run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import httpx

from ktserve.bench.prompts import Sizing, measure_sizing
from ktserve.bench.results import Results
from ktserve.bench.target import Endpoint, RequestFailed, Target, TargetError
from ktserve.bench.workloads import (
    Shape,
    Workload,
    decode,
    shared_prefix,
    time_to_first_token,
)

WorkloadName = Literal["ttft", "decode", "shared"]
WORKLOADS: tuple[WorkloadName, ...] = ("ttft", "decode", "shared")
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where a server is and how to speak to it."""

    label: str
    url: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure, bounded in count and time.

    Attributes:
        seed: of the prompts; None draws one, so that no server can know them from before.
        time_limit: seconds for everything.
        request_timeout: seconds without a byte after which a request has failed.
    """

    workloads: Sequence[WorkloadName]
    runs: int
    shape: Shape
    endpoint: Endpoint
    time_limit: float
    request_timeout: float
    seed: int | None = None


async def measure(
    servers: Sequence[Server], plan: Plan, results: Results, progress: Progress
) -> None:
    """Carry out ``plan`` into ``results``, which holds what there is even when this is cancelled.

    In each run every workload goes to all servers with the same prompts before the next begins, the
    order of the servers turning from run to run, so that a drift of the machine meets them alike.

    Raises:
        TargetError: a server cannot be measured at all.
    """
    rng = random.Random(plan.seed)
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(_target(server, plan)) for server in servers]
        try:
            async with asyncio.timeout(plan.time_limit):
                for target in targets:
                    progress(f"{target.label}: preparing")
                    await target.prepare()
                    results.found[target.label] = _found(target)
                try:
                    sizing = await measure_sizing(targets[0], rng)
                except RequestFailed as error:
                    raise TargetError(f"{targets[0].url}: {error}") from None
                results.found["prompts"] = vars(sizing)
                await _runs(targets, plan, sizing, rng, results, progress)
        except TimeoutError:
            results.stopped = f"the time limit of {plan.time_limit:g} s is over (--time-limit)"


async def _runs(
    targets: Sequence[Target],
    plan: Plan,
    sizing: Sizing,
    rng: random.Random,
    results: Results,
    progress: Progress,
) -> None:
    for run in range(plan.runs):
        order = targets if run % 2 == 0 else list(reversed(targets))
        for workload in _workloads(plan, sizing, rng):
            for target in order:
                progress(f"run {run + 1} of {plan.runs}: {workload.name}, {target.label}")
                note = partial(results.add_failure, target.label, workload.name, run + 1)
                results.add(target.label, await workload.measure(target, note))


def _workloads(plan: Plan, sizing: Sizing, rng: random.Random) -> list[Workload]:
    """The workloads of one run, each with new prompts."""
    made: list[Workload] = []
    for name in plan.workloads:
        if name == "ttft":
            made.append(time_to_first_token(plan.shape, sizing, rng))
        elif name == "decode":
            made += [decode(plan.shape, n, sizing, rng) for n in plan.shape.concurrency]
        else:
            made.append(shared_prefix(plan.shape, sizing, rng))
    return made


def _found(target: Target) -> dict[str, Any]:
    return {
        "url": target.url,
        "model": target.model,
        "accepted_fields": sorted(target.accepted),
        "extra_fields": sorted(target.extra),
        "reported": target.reported,
    }


@contextlib.asynccontextmanager
async def _target(server: Server, plan: Plan) -> AsyncIterator[Target]:
    headers = {"Accept-Encoding": "identity"}
    if server.api_key is not None:
        headers["Authorization"] = f"Bearer {server.api_key}"
    at_once = max(*plan.shape.concurrency, plan.shape.shared_at_once)
    async with httpx.AsyncClient(
        base_url=server.url,
        headers=headers,
        timeout=plan.request_timeout,
        limits=httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once),
        # A proxy from the environment would carry loopback traffic to another machine.
        trust_env=False,
    ) as client:
        yield Target(
            label=server.label,
            url=server.url,
            client=client,
            endpoint=plan.endpoint,
            model=server.model,
            extra=server.extra,
        )
