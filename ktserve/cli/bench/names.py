"""Options whose value is a list of known words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ktserve.cli.bench.report import refuse

Name = TypeVar("Name", bound=str)


def names(flag: str, text: str, known: Sequence[Name]) -> tuple[Name, ...]:
    """The words of ``text``, with commas between them, in its order; ends the command otherwise."""
    named = [part.strip() for part in text.split(",")]
    found = tuple(name for part in named for name in known if name == part)
    if len(found) < len(named) or len(set(found)) < len(found):
        refuse(f"{flag}: takes each of {', '.join(known)} once at most, not {text!r}")
    return found
