"""The command `ktserve`: its sub-commands, its version, and what becomes of a fault of our own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import ktserve
from ktserve.cli import bench, completions, doctor, run, tenants
from ktserve.cli.exit_codes import ExitCode

# Without rich: formatting the help with it takes as long again as everything else together. Pretty
# exceptions would print local variables, and with them prompts and keys.
app = typer.Typer(
    name="ktserve",
    help="Serve a language model to many tenants, each with a prefix cache of its own.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ktserve {ktserve.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and end."
        ),
    ] = False,
) -> None:
    """Serve a language model to many tenants, each with a prefix cache of its own."""


run.register(app)
completions.register(app)
doctor.register(app)
app.add_typer(tenants.app, name="tenants")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line; a fault of ktserve itself ends with `ExitCode.INTERNAL`."""
    try:
        app(prog_name="ktserve")
    except Exception:
        _report_fault()
        sys.exit(ExitCode.INTERNAL)


def _report_fault() -> None:
    import traceback

    from ktserve.logs import clean

    for line in traceback.format_exc().splitlines():
        print(clean(line), file=sys.stderr)
    print("This is a fault of ktserve itself, please report it.", file=sys.stderr)
