"""What every benchmark's report has: how and where it was started, a table, a JSON document."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ktserve.cli.exit_codes import ExitCode

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")
]

_SECRET_FLAGS = ("--api-key", "--vs-api-key")


def record_of(plan: dict[str, Any]) -> dict[str, Any]:
    """How this was started, when, with what versions and on what machine; ``plan`` as it is."""
    from ktserve.bench.machine import describe, versions

    return {
        "command": shlex.join(_without_secrets(["ktserve", *sys.argv[1:]])),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": describe(),
        "plan": plan,
    }


def _without_secrets(arguments: list[str]) -> list[str]:
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        flag, separator, _ = argument.partition("=")
        shown.append("***" if hide_next else argument)
        hide_next = argument in _SECRET_FLAGS
        if separator and flag in _SECRET_FLAGS:
            shown[-1] = f"{flag}=***"
    return shown


def show(table: str, json_file: Path | None, document: dict[str, Any]) -> None:
    """Print ``table``; write ``document`` to ``json_file`` if there is one."""
    from ktserve.bench.results import write_json

    typer.echo(table)
    if json_file is not None:
        write_json(json_file, document)
        say(f"written to {json_file}")


def check_directory(json_file: Path | None) -> None:
    """Refuse a ``json_file`` that cannot be written, before anything is measured."""
    if json_file is not None and not json_file.parent.is_dir():
        refuse(f"--json: the directory {json_file.parent} does not exist; make it first")


def refuse(problem: str) -> NoReturn:
    """Say what is wrong with the command line, and end."""
    say(problem)
    sys.exit(ExitCode.USAGE)


def say(text: str) -> None:
    """A line for people, beside the results."""
    from ktserve.logs import clean

    typer.echo(f"ktserve bench: {clean(text)}", err=True)
