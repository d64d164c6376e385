"""What a JSON value must be: each check gives the typed value, or a 400 that names the field.

JSON's ``true`` is no number here, ``1e400`` and ``NaN`` are no numbers at all, and text with a lone
surrogate is no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from ktserve.api.errors import invalid

Check = Callable[[str, object], Any]


def boolean(param: str, value: object) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        raise invalid(param, f"must be true or false, not {json_type(value)}")
    return value


def text(param: str, value: object) -> str:
    """A string of valid Unicode."""
    if not isinstance(value, str):
        raise invalid(param, f"must be a string, not {json_type(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(param, "holds a lone surrogate, which is not text") from None
    return value


def array(param: str, value: object) -> list[object]:
    """A list."""
    if not isinstance(value, list):
        raise invalid(param, f"must be a list, not {json_type(value)}")
    return value


def mapping(param: str, value: object) -> dict[str, object]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise invalid(param, f"must be an object, not {json_type(value)}")
    return cast(dict[str, object], value)


def whole(minimum: int, maximum: int) -> Callable[[str, object], int]:
    """A check for whole numbers from ``minimum`` to ``maximum``, both allowed."""

    def check(param: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(param, f"must be a whole number, not {json_type(value)}")
        if not minimum <= value <= maximum:
            raise invalid(param, f"must be from {minimum} to {maximum}{_not(value)}")
        return value

    return check


def number(
    minimum: float, maximum: float, *, above_minimum: bool = False
) -> Callable[[str, object], float]:
    """A check for finite numbers from ``minimum`` (itself allowed unless ``above_minimum``)."""

    def check(param: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(param, f"must be a number, not {json_type(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(param, "must be a finite number")
        if not minimum <= value <= maximum or (above_minimum and value == minimum):
            lower = f"above {minimum:g}" if above_minimum else f"from {minimum:g}"
            raise invalid(param, f"must be {lower} to {maximum:g}{_not(value)}")
        return float(value)

    return check


def json_type(value: object) -> str:
    """What JSON calls ``value``, with its article."""
    names: dict[type, str] = {
        bool: "a boolean",
        int: "a number",
        float: "a number with a fraction",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")


def _not(value: float) -> str:
    """The value at fault, unless it is too long to help."""
    return f", not {value}" if -(10**20) < value < 10**20 else ""
