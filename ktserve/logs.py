"""Log lines, and the cleaning of text that others control.

A prompt's author, a client or a file name must not be able to forge a log line or drive the
terminal that shows it, so everything that is logged passes `clean` in the formatter.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

# C0, DEL and C1 controls; line and paragraph separators; marks and overrides of direction;
# lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_OWN_FIELDS = frozenset({"ts", "level", "process", "logger", "message", "traceback"})


def clean(text: str) -> str:
    r"""``text`` safe to print on one line of a log or terminal: what controls is shown, not done.

    Control characters (newline, tab and escape among them), line separators, bidirectional marks
    and overrides, and lone surrogates become ``\x1b`` or ``\u202e``. Other text is unchanged.
    """
    return _UNSAFE.sub(_escaped, text)


def configure(
    level: str, format: LogFormat, stream: TextIO | None = None, *, process: str = "ktserve"
) -> None:
    """Send every log record of this process to ``stream`` (standard error), replacing what was set.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        format: ``text`` for people or ``json`` for one object a line.
        process: the name of this process in the lines, for example ``engine``.
    """
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    logging.captureWarnings(True)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """``[2026-01-02 03:04:05] INFO engine: message``, in local time.

    A record is one line. A traceback follows on lines of their own, each begun with ``    | ``, so
    that none of them can be taken for a record.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"[{when}] {record.levelname} {self._process}: {clean(record.getMessage())}"
        return "\n    | ".join([line, *_traceback(self, record)])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``ts`` (RFC 3339, UTC), ``level``, ``process``, ``logger``,
    ``message``, the record's extra fields, and ``traceback`` (a list of lines) with an error."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        document: dict[str, Any] = {
            "ts": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": clean(record.name),
            "message": clean(record.getMessage()),
        }
        for key, value in vars(record).items():
            if key not in _STANDARD_FIELDS and key not in _OWN_FIELDS:
                document[clean(key)] = _plain(value)
        if lines := _traceback(self, record):
            document["traceback"] = lines
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        # The standard one prints the arguments, which may hold what a log must not.
        error = sys.exc_info()[0]
        kind = "an error" if error is None else error.__name__
        place = f"{clean(record.name)}, {clean(record.pathname)}:{record.lineno}"
        print(f"a log record could not be written ({place}): {kind}", file=sys.__stderr__)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    lines: list[str] = []
    if record.exc_info and record.exc_info[0] is not None:
        lines += formatter.formatException(record.exc_info).split("\n")
    if record.stack_info:
        lines += record.stack_info.split("\n")
    return [clean(line) for line in lines]


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        # JSON has no word for these.
        return value if value - value == 0 else str(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return clean(str(value))
