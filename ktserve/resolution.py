"""Which value each setting has, and where it came from.

A flag wins over the environment, that over the TOML file, that over the default. What cannot be
understood is refused: a misspelt key or variable is an error, never a silent default.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tomllib
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ktserve.config import ENVIRONMENT_PREFIX, Setting, Settings, declared
from ktserve.logs import clean

CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
"""Names the TOML file where no ``--config`` does."""

DEFAULT_ORIGIN = "default"

_OTHER_PREFIXES = (ENVIRONMENT_PREFIX + "BENCH_", ENVIRONMENT_PREFIX + "TEST_")
_SWITCH_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
# Stricter than int() and float(): no 1_000, +1, 007, spaces or digits of other scripts.
_NUMBERS = {
    int: re.compile(r"-?(?:0|[1-9][0-9]*)"),
    float: re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
}
_KIND_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_EXAMPLES = {int: "1024", float: "0.5"}


class SettingError(ValueError):
    """A setting cannot be used. The message, of one line, names it, where its value came from, the
    limit and the remedy; it never holds a secret's value."""


@dataclass(frozen=True)
class Resolved:
    """The settings and, for each by name, where its value came from: ``MODEL`` (the argument), a
    flag, a variable, a file, or ``default``."""

    settings: Settings
    origins: Mapping[str, str]


def resolve(
    flags: Mapping[str, str | bool | None],
    environ: Mapping[str, str],
    toml_path: Path | None,
    argument: str | None = None,
) -> Resolved:
    """The settings from every source, each checked, and checked against each other.

    Args:
        flags: values from the command line by setting name; None is "not given".
        environ: the environment; only what begins with ``KTSERVE_`` is looked at.
        toml_path: a file of settings; paths in it are relative to its directory.
        argument: of the command line, for the setting that is positional; as strong as a flag.

    Raises:
        SettingError: a source, a value or a combination is wrong.
    """
    environment = _environment(environ)
    file = {} if toml_path is None else _toml(toml_path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, setting in declared().items():
        base = Path()
        raw: object = flags.get(name)
        if argument is not None and setting.rule.positional:
            origin = name.upper()
            if raw not in (None, argument):
                raise SettingError(
                    f"{name} is given twice, as {origin} and with {setting.flags[0]}; give it once"
                )
            raw = argument
        elif raw is not None:
            origin = setting.flags[0]
        elif name in environment:
            raw, origin = environment[name], setting.variable
        elif toml_path is not None and name in file:
            raw, origin, base = file[name], clean(str(toml_path)), toml_path.parent
        else:
            values[name], origins[name] = setting.default, DEFAULT_ORIGIN
            continue
        values[name] = _Given(setting, raw, origin).checked(base)
        origins[name] = origin
    settings = Settings(**values)
    _check_together(settings, origins)
    return Resolved(settings, origins)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    variables = {setting.variable: name for name, setting in declared().items()}
    found: dict[str, str] = {}
    for variable, value in environ.items():
        if variable in variables:
            found[variables[variable]] = value
        elif (
            variable.startswith(ENVIRONMENT_PREFIX)
            and variable != CONFIG_VARIABLE
            and not variable.startswith(_OTHER_PREFIXES)
        ):
            raise SettingError(
                f"{clean(variable)} (environment) is no setting{_suggest(variable, variables)}; "
                "unset it"
            )
    return found


def _toml(path: Path) -> dict[str, object]:
    shown = clean(str(path))
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise SettingError(
            f"--config {shown} cannot be read: {error.strerror}; give a readable TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--config {shown} is not TOML: {clean(str(error))}; mend it") from None
    for key in table:
        if key not in declared():
            raise SettingError(
                f"{clean(key)} (from {shown}) is no setting{_suggest(key, declared())}; remove it"
            )
    return table


def _suggest(word: str, known: Collection[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]}?" if close else ""


@dataclass(frozen=True)
class _Given:
    """A value that a source gave for a setting, not yet checked."""

    setting: Setting
    raw: object
    origin: str

    def checked(self, base: Path) -> str | int | float | bool:
        """The value with its right type; a relative path is taken from ``base``.

        Raises:
            SettingError: it is not of that type or breaks the setting's rule.
        """
        kind = self.setting.kind
        if kind is bool:
            return self._switch()
        if kind is str:
            return self._text(base)
        return self._number()

    def _fail(self, limit: str, remedy: str) -> NoReturn:
        secret = self.setting.rule.secret
        shown = "" if secret else f" = {clean(_shortened(self.raw))}"
        raise SettingError(
            f"{self.setting.name}{shown} (from {self.origin}) must be {limit}; {remedy}"
        )

    def _switch(self) -> bool:
        if isinstance(self.raw, bool):
            return self.raw
        word = self.raw.lower() if isinstance(self.raw, str) else None
        if word not in _SWITCH_WORDS:
            self._fail("true or false", "write one of them")
        return _SWITCH_WORDS[word]

    def _number(self) -> int | float:
        kind, rule = self.setting.kind, self.setting.rule
        number: int | float | None = None
        if isinstance(self.raw, str):
            written = int if kind is int else float
            if _NUMBERS[written].fullmatch(self.raw):
                # Python reads no whole number of thousands of digits.
                with contextlib.suppress(ValueError):
                    number = written(self.raw)
        elif type(self.raw) is int or (kind is float and type(self.raw) is float):
            number = self.raw
        if number is None:
            self._fail(_KIND_WORDS[kind], "write one in plain digits, like " + _EXAMPLES[kind])
        low = -math.inf if rule.minimum is None else rule.minimum
        high = math.inf if rule.maximum is None else rule.maximum
        # Written so that NaN fails it.
        if not low <= number <= high:
            self._fail(self.setting.limits, "choose a value in that range")
        return number if kind is int else float(number)

    def _text(self, base: Path) -> str:
        setting = self.setting
        if not isinstance(self.raw, str):
            self._fail("text", "put it in quotes")
        if not self.raw:
            self._fail("more than an empty text", "leave it out to set nothing")
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in self.raw):
            self._fail("UTF-8 without control characters", "remove what is not")
        if setting.choices and self.raw not in setting.choices:
            meant = _suggest(self.raw, setting.choices)
            self._fail(f"one of {', '.join(setting.choices)}{meant}", "choose one")
        pattern = setting.rule.pattern
        if pattern is not None and re.fullmatch(pattern, self.raw) is None:
            self._fail(setting.rule.pattern_help, "choose another")
        if setting.rule.path is None:
            return self.raw
        path = os.path.join(base, os.path.expanduser(self.raw))
        if setting.rule.path == "file" and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            self._fail("a file that can be read", "check the path and its permissions")
        if setting.rule.path == "directory" and os.path.exists(path) and not os.path.isdir(path):
            self._fail("a directory, or not exist yet", "choose another path")
        return path


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_together(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raise SettingError when values that are each allowed exclude each other."""

    def fail(name: str, problem: str) -> NoReturn:
        shown = declared()[name].shown(getattr(settings, name))
        raise SettingError(f"{name} = {shown} (from {origins[name]}) {problem}")

    if settings.tp_size != 1:
        fail("tp_size", "cannot be: tensor parallelism is not in this version; use --tp-size 1")
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        fail("ssl_keyfile", "needs the certificate; give --ssl-certfile too")
    if settings.api_key is not None and settings.tenants is not None:
        fail(
            "api_key",
            f"excludes tenants (from {origins['tenants']}), whose file holds their keys; "
            "give one of the two",
        )
    chunk, page = settings.chunked_prefill_size, settings.page_size
    if chunk is not None and chunk != -1 and chunk < page:
        fail(
            "chunked_prefill_size",
            f"must be -1 or at least page_size, {page}; raise it or lower --page-size",
        )
    budget, running = settings.max_num_batched_tokens, settings.max_running_requests
    if budget is not None and budget < running:
        fail(
            "max_num_batched_tokens",
            f"must be at least max_running_requests, {running}, so that every running request "
            "gets a token in a step; raise it or lower --max-running-requests",
        )
    if settings.max_total_tokens is not None and settings.max_total_tokens < page:
        fail(
            "max_total_tokens",
            f"must be at least page_size, {page}; raise it or lower --page-size",
        )
    if settings.radix_eviction_policy == "priority" and settings.cache_sharing == "shared":
        fail(
            "radix_eviction_policy",
            "cannot be with cache_sharing shared: clients set priorities, and one could keep all"
            " others out; use --cache-sharing floors or partitioned",
        )
    if settings.disable_radix_cache and settings.schedule_policy == "lpm":
        fail(
            "schedule_policy",
            "sorts by cached prefix and needs the radix cache; "
            "use fcfs or leave --disable-radix-cache out",
        )
