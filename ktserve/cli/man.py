"""Manual pages in man(7), written from the command tree: one for each command."""

from __future__ import annotations

from collections.abc import Iterator

from ktserve.cli.command_tree import Command, Flag
from ktserve.cli.exit_codes import ExitCode

_EXIT = {
    ExitCode.GOOD: "It was done.",
    ExitCode.CHECK_FAILED: "It was done, and the answer is no.",
    ExitCode.USAGE: "A flag, variable, file or argument is wrong.",
    ExitCode.CANNOT_CONNECT: "The server cannot be reached, or refuses.",
    ExitCode.INCONCLUSIVE: "The check ran and could not tell.",
    ExitCode.PROTOCOL_MISMATCH: "The other side speaks another version.",
    ExitCode.TARGET_UNHEALTHY: "The server under test became unhealthy.",
    ExitCode.INTERNAL: "A fault of ktserve itself.",
}


def pages(root: Command) -> dict[str, str]:
    """The text of each page by its file's name."""
    return {f"{_name(command)}.1": _page(command) for command in root.walk()}


def _page(command: Command) -> str:
    lines = [
        f'.TH {_name(command).upper()} 1 "" "ktserve" "User Commands"',
        ".SH NAME",
        f"{_escaped(_name(command))} \\- {_escaped(command.help.rstrip('.'))}",
        ".SH SYNOPSIS",
        *_synopsis(command),
        ".SH DESCRIPTION",
        _escaped(command.about),
    ]
    if command.subcommands:
        lines.append(".SH COMMANDS")
        for sub in command.subcommands:
            lines += [".TP", f".BR {_escaped(_name(sub))} (1)", _escaped(sub.help)]
    if command.arguments:
        lines.append(".SH ARGUMENTS")
        for name, about in command.arguments:
            lines += [".TP", f".I {_escaped(name)}", _escaped(about)]
    lines.append(".SH OPTIONS")
    for flag in command.flags:
        lines += [".TP", _flag(flag), _escaped(flag.about)]
    if command.epilog:
        lines += [".SH NOTES", _escaped(command.epilog)]
    lines += [".SH EXIT STATUS", *_exit_status()]
    return "\n".join([*lines, ""])


def _synopsis(command: Command) -> list[str]:
    words = " ".join(("ktserve", *command.words))
    rest = " [OPTIONS]" + (" COMMAND" if command.subcommands else "")
    rest += "".join(f" {name}" for name, _ in command.arguments)
    return [f".B {_escaped(words)}", _escaped(rest.strip())]


def _flag(flag: Flag) -> str:
    names = ", ".join(f"\\fB{_escaped(name)}\\fR" for name in flag.names)
    return names if flag.value is None else f"{names} \\fI{_escaped(flag.value)}\\fR"


def _exit_status() -> Iterator[str]:
    for code, meaning in _EXIT.items():
        yield from (".TP", f".B {code.value}", meaning)


def _name(command: Command) -> str:
    return "-".join(("ktserve", *command.words))


def _escaped(text: str) -> str:
    """``text`` as it is: no escape, no request at the beginning of a line, no typographic dash."""
    safe = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + safe if safe.startswith((".", "'")) else safe
