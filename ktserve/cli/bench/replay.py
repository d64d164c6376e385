"""`ktserve bench replay`: traces through the cache, without a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ktserve.cli.bench.names import Name, names
from ktserve.cli.bench.report import JsonFile, check_directory, record_of, refuse, say, show
from ktserve.cli.exit_codes import ExitCode
from ktserve.cli.help import Command

if TYPE_CHECKING:
    from ktserve.bench.replay_report import TraceReport

_MAX_SIZES = 16


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("replay", cls=Command)(_replay)


def _replay(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE", help="Mooncake's .jsonl files, and directories of agent sessions."
        ),
    ],
    pages: Annotated[
        str,
        typer.Option(metavar="INTEGER,...", help="Sizes of the pool. A block is a page."),
    ] = "24000",
    sharing: Annotated[
        str,
        typer.Option(metavar="[shared|floors|partitioned],...", help="How tenants share it."),
    ] = "shared,floors,partitioned",
    policy: Annotated[
        str, typer.Option(metavar="[lru|lfu|slru|fifo],...", help="Whose pages go first.")
    ] = "lru",
    tenants: Annotated[
        int,
        typer.Option(
            metavar="INTEGER",
            min=0,
            max=10_000,
            help="Tenants of equal weight, to whom sessions (Mooncake: first blocks) are dealt "
            "out; 0 makes each of those a tenant.",
        ),
    ] = 5,
    spread: Annotated[
        float,
        typer.Option(
            metavar="NUMBER",
            min=0,
            max=10_000_000,
            help="Seconds within which agent sessions begin. Mooncake's times are as they are.",
        ),
    ] = 600,
    scans: Annotated[
        int,
        typer.Option(
            metavar="INTEGER",
            min=1,
            max=100,
            help="The scanner's requests to each other one, in the middle half of a trace.",
        ),
    ] = 2,
    scanner_share: Annotated[
        float,
        typer.Option(
            metavar="NUMBER", min=0.001, max=0.9, help="The scanner's part of all weights."
        ),
    ] = 0.1,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="INTEGER",
            min=1,
            max=100,
            help="How often everything is done; means are over these.",
        ),
    ] = 5,
    json_file: JsonFile = None,
) -> None:
    """Replay traces of prompts through the prefix cache, without a model: who finds how much.

    Each trace is replayed quiet and with a scanner, a tenant whose prompts never come again.
    """
    from ktserve.bench.replay import NoPages, Plan, best_possible, measure, turns_of
    from ktserve.bench.replay_report import TraceReport
    from ktserve.bench.traces import TraceError, read_trace
    from ktserve.cache.policies import EvictionPolicy
    from ktserve.tenancy.shares import CacheSharing

    plan = Plan(
        pages=_sizes(pages),
        sharing=_ordered("--sharing", sharing, get_args(CacheSharing)),
        # Clients set priorities, and a trace has none.
        policies=_ordered(
            "--policy", policy, [name for name in get_args(EvictionPolicy) if name != "priority"]
        ),
        tenants=tenants,
        spread=spread,
        scans=scans,
        scanner_share=scanner_share,
        seeds=seeds,
    )
    check_directory(json_file)
    record = record_of(asdict(plan))
    try:
        found = [read_trace(path) for path in traces]
    except TraceError as error:
        refuse(str(error))
    reports: list[TraceReport] = []
    stopped = None
    try:
        for trace in found:
            reports.append(TraceReport(trace, best_possible(turns_of(trace, plan, seed=0))))
            for replayed in measure(trace, plan, say):
                reports[-1].replays.append(replayed)
    except NoPages as error:
        refuse(f"--pages: {error}")
    except KeyboardInterrupt:
        stopped = "interrupted"
    document = {"stopped": stopped, "traces": [report.document() for report in reports]}
    show("\n\n".join(report.table() for report in reports), json_file, {**record, **document})
    if stopped is not None:
        sys.exit(ExitCode.INCONCLUSIVE)


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        refuse("--pages: takes whole numbers below 1,000,000,000, for example 10000,24000")
    sizes = tuple(int(part) for part in parts)
    if 0 in sizes or len(set(sizes)) < len(sizes) or len(sizes) > _MAX_SIZES:
        refuse(f"--pages: takes up to {_MAX_SIZES} different numbers from 1 on")
    return sizes


def _ordered(flag: str, text: str, known: Sequence[Name]) -> tuple[Name, ...]:
    """The words of ``text`` in the order of ``known``, which is that of the table's rows."""
    return tuple(sorted(names(flag, text, known), key=known.index))
