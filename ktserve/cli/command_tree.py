"""The commands of `ktserve` as data, for completions and man pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typer.main import get_command


@dataclass(frozen=True)
class Flag:
    """One option of a command.

    Attributes:
        names: every spelling, the ones that turn a switch off included.
        help: its first sentence; ``about`` is all of it.
        value: None for a switch, else its metavar.
    """

    names: tuple[str, ...]
    help: str
    value: str | None
    about: str

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values, or nothing."""
        if self.value is None or not self.value.startswith("["):
            return ()
        return tuple(self.value[1 : self.value.index("]")].split("|"))


@dataclass(frozen=True)
class Command:
    """A command with its options and sub-commands; ``words`` lead to it: ("tenants", "new").

    Attributes:
        help: its first sentence; ``about`` is all of it.
        arguments: their metavars, as in the usage line, and help.
        epilog: what stands below the options.
    """

    words: tuple[str, ...]
    help: str
    about: str
    arguments: tuple[tuple[str, str], ...]
    flags: tuple[Flag, ...]
    subcommands: tuple[Command, ...]
    epilog: str = ""

    def walk(self) -> Iterator[Command]:
        """This command and all below it, parents first."""
        yield self
        for subcommand in self.subcommands:
            yield from subcommand.walk()


def tree() -> Command:
    """The commands of `ktserve` as Typer builds them."""
    from ktserve.cli.main import app

    return _command(get_command(app), ())


def _command(command: Any, words: tuple[str, ...]) -> Command:
    flags = [
        Flag(
            names=(*parameter.opts, *parameter.secondary_opts),
            help=_one_line(parameter.help or ""),
            value=None if parameter.is_flag else (parameter.metavar or "VALUE"),
            about=_joined(parameter.help or ""),
        )
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.hidden
    ]
    shown = "Show the help and end."
    flags.append(Flag(("-h", "--help"), shown, None, shown))
    subcommands = tuple(
        _command(subcommand, (*words, name))
        for name, subcommand in getattr(command, "commands", {}).items()
        if not subcommand.hidden
    )
    arguments = tuple(
        (parameter.metavar or parameter.name.upper(), _joined(parameter.help or ""))
        for parameter in command.params
        if parameter.param_type_name == "argument"
    )
    return Command(
        words,
        _one_line(command.help or ""),
        _joined(command.help or ""),
        arguments,
        tuple(flags),
        subcommands,
        epilog=_joined(command.epilog or ""),
    )


def _one_line(text: str) -> str:
    """The first sentence, without the note on its default."""
    return " ".join(text.partition(" [default")[0].partition("\n\n")[0].split())


def _joined(text: str) -> str:
    return " ".join(text.split())
