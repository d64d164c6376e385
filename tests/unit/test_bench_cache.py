"""`ktserve bench cache`: every operation is there, and what it times is really done."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from ktserve.bench.cache import Shape, measure
from ktserve.cli.bench import app


def test_every_operation_is_measured_as_often_as_asked_for():
    shape = Shape(nodes=20, page_size=4, namespaces=3, prompt_tokens=(512,), repetitions=5)
    said: list[str] = []
    figures = list(measure(shape, said.append))
    names = {figure.name for figure in figures}
    assert names == {
        "lookup, 512 tokens, one edge",
        "lookup, 512 tokens, grown",
        "lease and release, 512 tokens, one edge",
        "lease and release, 512 tokens, grown",
        "insert, 512 tokens",
        "split, 512 tokens",
        "evict 64 tokens",
    }
    assert len(figures) == 5 * len(names)
    assert all(figure.value > 0 and figure.unit == "us" for figure in figures)
    assert said


def test_the_command_writes_what_it_measured(tmp_path):
    file = tmp_path / "cache.json"
    arguments = ["cache", "--nodes", "10", "--repetitions", "2", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "evict 64 tokens" in result.output
    written = json.loads(file.read_text())
    assert written["plan"]["nodes"] == 10
    assert all(len(figure["runs"]) == 2 for figure in written["figures"])


def test_a_missing_directory_is_refused_before_anything_is_measured(tmp_path):
    result = CliRunner().invoke(app, ["cache", "--json", str(tmp_path / "none" / "x.json")])
    assert result.exit_code == 2
