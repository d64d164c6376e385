"""Log lines: their form, and what hostile text can do to them."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktserve.logs import LogFormat, clean, configure

HOSTILE = "a\n[2026-01-02 03:04:05] INFO engine: forged\x1b[2J\x9b\x7f\u202e\u2066\u2028\ud800\r\t"


@pytest.fixture(autouse=True)
def _root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def configured(format: LogFormat, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure(level, format, stream, process="engine")
    return stream


def logged(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert isinstance(document, dict)
    return document


def test_clean_shows_what_controls_and_keeps_the_rest() -> None:
    assert clean("\x1b[31m\n\u202e\ud800") == r"\x1b[31m\x0a\u202e\ud800"
    assert clean("naïve 日本 👩‍👩‍👧 ok") == "naïve 日本 👩‍👩‍👧 ok"


@given(st.text(st.characters()))
def test_cleaned_text_is_one_line_of_valid_unicode(text: str) -> None:
    cleaned = clean(text)
    assert len(cleaned.splitlines()) <= 1
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", cleaned)
    cleaned.encode()
    assert clean(cleaned) == cleaned


def test_text_line_has_the_documented_form() -> None:
    stream = configured("text")
    logging.getLogger("ktserve.engine.scheduler").info("Prefill batch, #new-seq: %d", 1)
    line = stream.getvalue()
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] INFO engine: Prefill batch, #new-seq: 1\n", line
    )


def test_hostile_text_cannot_forge_a_text_line() -> None:
    stream = configured("text")
    logging.getLogger("x").warning("from %s", HOSTILE)
    assert len(stream.getvalue().splitlines()) == 1
    assert stream.getvalue().removesuffix("\n").isprintable()


def test_hostile_error_cannot_forge_a_text_line() -> None:
    stream = configured("text")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("x").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("ERROR engine: failed")
    assert rest
    assert all(line.startswith("    | ") and line.isprintable() for line in rest)


def test_json_line_has_its_fields_and_extras() -> None:
    stream = configured("json")
    extra = {"pages": 3, "share": float("nan"), "who": {"name": HOSTILE}, "level": "forged"}
    logging.getLogger("ktserve.engine").info("text %s", HOSTILE, extra=extra)
    document = logged(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", document["ts"])
    assert (document["level"], document["process"]) == ("info", "engine")
    assert document["logger"] == "ktserve.engine"
    assert document["message"] == "text " + clean(HOSTILE)
    assert document["pages"] == 3
    assert document["share"] == "nan"
    assert document["who"] == {"name": clean(HOSTILE)}


def test_json_traceback_holds_no_local_variables() -> None:
    stream = configured("json")
    prompt = "the " + "prompt"
    try:
        raise RuntimeError(f"of {len(prompt)}")
    except RuntimeError:
        logging.getLogger("x").exception("failed")
    document = logged(stream)
    assert document["traceback"][-1] == "RuntimeError: of 10"
    assert "the prompt" not in stream.getvalue()


def test_level_is_the_least_that_is_logged() -> None:
    stream = configured("text", level="warning")
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


def test_configuring_again_does_not_double_lines() -> None:
    configured("text")
    stream = configured("text")
    logging.getLogger("x").info("once")
    assert stream.getvalue().count("once") == 1


def test_a_record_that_cannot_be_formatted_shows_no_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = io.StringIO()
    monkeypatch.setattr("sys.__stderr__", errors)
    stream = configured("text")
    logging.getLogger("x").info("%d", "a prompt")
    assert stream.getvalue() == ""
    assert "TypeError" in errors.getvalue()
    assert "a prompt" not in errors.getvalue()
