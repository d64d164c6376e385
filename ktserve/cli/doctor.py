"""`ktserve doctor`: whether this machine can serve, and what to do where it cannot."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from ktserve.cli.exit_codes import ExitCode
from ktserve.cli.help import Command


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("doctor", cls=Command)(_doctor)


def _doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for `ktserve run`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only what needs action.")] = False,
) -> None:
    """Look at this machine: packages, device, memory, sockets, model. Exit status 1 if a server
    could not start."""
    from ktserve.cli.diagnosis import examine
    from ktserve.logs import clean
    from ktserve.resolution import SettingError, resolve

    try:
        settings = resolve({}, os.environ, None, model).settings
    except SettingError as error:
        typer.echo(f"ktserve doctor: {clean(str(error))}", err=True)
        raise typer.Exit(ExitCode.USAGE) from None
    findings = []
    for finding in examine(settings):
        findings.append(finding)
        if as_json or (quiet and finding.state == "good"):
            continue
        typer.echo(f"{finding.state:8}{finding.what:10}{clean(finding.found)}")
        if finding.remedy:
            typer.echo(f"{'':18}-> {clean(finding.remedy)}")
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(ExitCode.CHECK_FAILED)
