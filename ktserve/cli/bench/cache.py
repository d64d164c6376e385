"""`ktserve bench cache`: the cost of the cache's operations."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, get_args

import typer

from ktserve.cli.bench.names import names
from ktserve.cli.bench.report import JsonFile, check_directory, record_of, refuse, say, show
from ktserve.cli.exit_codes import ExitCode
from ktserve.cli.help import Command

_MAX_VALUES = 16

_MATRIX = {
    "nodes": "100000,1000,10000,1000000",
    "page_size": "16,1",
    "namespaces": "1,100,10000",
    "tenants": "1,8,64",
    "records": "off,on",
}
"""The lists of ``--matrix``."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("cache", cls=Command)(_cache)


def _cache(
    operation: Annotated[
        str | None,
        typer.Option(
            metavar="[lookup|insert|split|lock|evict|request|memory],...",
            help="What is measured, any of them; unset: all.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="INTEGER,...", help="Lengths of the prompts that are timed.")
    ] = "512,8192,131072",
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER,...",
            help="Prompts that fill the forest before, a node each [default: 100000]. "
            "Of this and the next four lists the first values make the forest that is measured, "
            "and each further value one that differs in it alone.",
        ),
    ] = None,
    page_size: Annotated[
        str | None, typer.Option(metavar="INTEGER,...", help="Tokens a page [default: 16].")
    ] = None,
    namespaces: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER,...",
            help="Over which the filling is spread, at least one a tenant [default: 1].",
        ),
    ] = None,
    tenants: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER,...", help="Of equal weight, in the mode floors [default: 1]."
        ),
    ] = None,
    records: Annotated[
        str | None,
        typer.Option(
            metavar="[off|on],...",
            help="Record what happens. The operation request compares both [default: off].",
        ),
    ] = None,
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help="; ".join(
                f"--{flag.replace('_', '-')} {values}" for flag, values in _MATRIX.items()
            )
            + ", as far as they are not set. Takes minutes and 6 GB.",
        ),
    ] = False,
    repetitions: Annotated[
        int,
        typer.Option(
            metavar="INTEGER", min=1, max=1000, help="Of each operation; medians are over these."
        ),
    ] = 50,
    json_file: JsonFile = None,
) -> None:
    """Measure the prefix cache alone, without a model: what its operations cost."""
    from ktserve.bench.cache import Operation, Plan, Records, measure
    from ktserve.bench.results import Results

    given = {
        "nodes": nodes,
        "page_size": page_size,
        "namespaces": namespaces,
        "tenants": tenants,
        "records": records,
    }
    lists = {
        name: value if value is not None else _MATRIX[name] if matrix else _first(_MATRIX[name])
        for name, value in given.items()
    }
    operations = get_args(Operation)
    plan = Plan(
        operations=operations if operation is None else names("--operation", operation, operations),
        prompt_tokens=_numbers("--prompt-tokens", prompt_tokens, 256, 1_048_576),
        nodes=_numbers("--nodes", lists["nodes"], 1, 5_000_000),
        page_size=_numbers("--page-size", lists["page_size"], 1, 256),
        namespaces=_numbers("--namespaces", lists["namespaces"], 1, 1_000_000),
        tenants=_numbers("--tenants", lists["tenants"], 1, 10_000),
        records=names("--records", lists["records"], get_args(Records)),
        repetitions=repetitions,
    )
    check_directory(json_file)
    results = Results(("ktserve",))
    record = record_of(asdict(plan))
    try:
        for figure in measure(plan, say):
            results.add("ktserve", [figure])
    except KeyboardInterrupt:
        results.stopped = "interrupted"
    show(results.table(), json_file, {**record, **results.document()})
    if results.stopped is not None:
        sys.exit(ExitCode.INCONCLUSIVE)


def _first(values: str) -> str:
    return values.partition(",")[0]


def _numbers(flag: str, text: str, least: int, most: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    plain = all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts)
    numbers = tuple(int(part) for part in parts) if plain else ()
    if (
        not numbers
        or not least <= min(numbers) <= max(numbers) <= most
        or not len(set(numbers)) == len(numbers) <= _MAX_VALUES
    ):
        refuse(
            f"{flag}: takes up to {_MAX_VALUES} different numbers from {least:,} to {most:,},"
            " with a comma between them"
        )
    return numbers
