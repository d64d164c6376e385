"""`ktserve completions`: a shell's completion script, on standard output."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ktserve.cli.help import Command


class Shell(StrEnum):
    """The shells that there is a script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "completions",
        cls=Command,
        epilog="bash: source <(ktserve completions bash). zsh: write it to a file _ktserve in a "
        "directory of $fpath. fish: ktserve completions fish | source. Nothing is installed by "
        "itself.",
    )(_completions)


def _completions(
    shell: Annotated[Shell, typer.Argument(metavar="[bash|zsh|fish]", help="The shell.")],
) -> None:
    """Print the completion script of a shell."""
    from ktserve.cli.command_tree import tree
    from ktserve.cli.shells import WRITERS

    typer.echo(WRITERS[shell](tree()), nl=False)
