"""The command line: what it loads, how it ends, and what is generated from it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import ktserve
from ktserve.cli import diagnosis, plan
from ktserve.cli import main as cli
from ktserve.cli.diagnosis import Finding
from ktserve.cli.exit_codes import ExitCode
from ktserve.config import Settings, declared
from ktserve.resolution import resolve

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"fastapi", "gguf", "numpy", "rich", "textual", "torch", "transformers", "zmq"}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def modules_after(*arguments: str) -> set[str]:
    """The top-level modules that a process of this command line has loaded when it ends."""
    program = (
        "import sys, atexit\n"
        "from ktserve.cli.main import main\n"
        "atexit.register(lambda: print('loaded', *{m.partition('.')[0] for m in sys.modules}))\n"
        f"sys.argv = ['ktserve', *{arguments!r}]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("run", "--help"), ("tenants", "--help"), ("bench", "--help")],
)
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    loaded = modules_after(*arguments)
    assert "typer" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_help_takes_little_processor_time() -> None:
    """Processor time, which other programs of the machine lengthen less than the clock's."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    command = [sys.executable, "-m", "ktserve", "--help"]
    taken = []
    for _ in range(3):
        before = spent()
        subprocess.run(command, capture_output=True, cwd=ROOT, check=True, timeout=60)
        taken.append(spent() - before)
    assert 0 < min(taken) < 0.3


def test_version_is_the_package_version() -> None:
    result = invoke("--version")
    assert result.exit_code == ExitCode.GOOD
    assert result.output == f"ktserve {ktserve.__version__}\n"


def test_help_lists_every_flag_under_its_group() -> None:
    help_text = invoke("run", "--help").output
    for setting in declared().values():
        assert f"\n{setting.rule.group}:\n" in help_text
        assert all(flag in help_text for flag in setting.flags)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        ("bench", "serve"),
        ("bench", "cache"),
        ("bench", "replay"),
        ("tenants", "new"),
        ("tenants", "add-key"),
        ("tenants", "list"),
        ("tenants", "check"),
    ],
)
def test_placeholders_of_values_are_the_same_words_everywhere(arguments: tuple[str, ...]) -> None:
    words = {"TEXT", "INTEGER", "NUMBER", "FILE", "DIRECTORY", "URL", "JSON", "INTEGER,..."}
    help_text = invoke(*arguments, "--help").output
    assert "<" not in help_text.replace("<=", "")
    for placeholder in re.findall(r"^ +--[\w-]+(?:, --[\w-]+)? (\S+)", help_text, re.MULTILINE):
        if not placeholder.startswith("[") and placeholder.isupper():
            assert placeholder in words
    if arguments == ("run",):
        assert "--port INTEGER" in help_text
        assert "\n  MODEL  A directory" in help_text


def test_exit_codes_never_change() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "GOOD": 0,
        "CHECK_FAILED": 1,
        "USAGE": 2,
        "CANNOT_CONNECT": 3,
        "INCONCLUSIVE": 4,
        "PROTOCOL_MISMATCH": 5,
        "TARGET_UNHEALTHY": 6,
        "INTERNAL": 70,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--port", "http"),
        ("run", "--no-such-flag"),
        ("run", "a", "--model-path", "b"),
        ("run", "--config", "/nowhere/ktserve.toml"),
        ("no-such-command",),
    ],
)
def test_usage_errors_end_with_2(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == ExitCode.USAGE


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Settings, int]:
    """The settings that `ktserve run` hands to the supervisor, and the status it ends with."""
    handed: list[Settings] = []

    def supervise(settings: Settings) -> int:
        handed.append(settings)
        return 7

    monkeypatch.setattr("ktserve.supervisor.supervise", supervise)
    result = invoke("run", *arguments)
    assert len(handed) == 1, result.output
    return handed[0], result.exit_code


def test_run_hands_the_settings_to_the_supervisor_and_ends_with_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toml = tmp_path / "ktserve.toml"
    toml.write_text("port = 1\npage_size = 4\n")
    settings, status = started(
        monkeypatch, "some/model", "--config", str(toml), "--port", "2", "--no-enable-metrics"
    )
    assert settings == Settings(model="some/model", port=2, page_size=4)
    assert status == 7


def test_config_variable_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toml = tmp_path / "ktserve.toml"
    toml.write_text("port = 1\n")
    monkeypatch.setenv("KTSERVE_CONFIG", str(toml))
    assert started(monkeypatch)[0].port == 1


@pytest.mark.parametrize(
    "arguments", [("m",), ("--model", "m"), ("--model-path", "m"), ("m", "--model", "m")]
)
def test_every_spelling_of_the_model(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    assert started(monkeypatch, *arguments)[0].model == "m"


def test_settings_are_shown_with_their_origin_and_no_secret() -> None:
    out = io.StringIO()
    resolved = resolve({"api_key": "top-secret", "port": "1"}, {"KTSERVE_NAME": "x"}, None)
    effective = dataclasses.replace(resolved.settings, context_length=8192, dtype="float32")
    plan.show_settings(resolved, effective, out)
    rows = [line.split("\t") for line in out.getvalue().splitlines()]
    assert [row[0] for row in rows] == list(declared())
    assert ["port", "1", "--port"] in rows
    assert ["name", "x", "KTSERVE_NAME"] in rows
    assert ["api_key", "(set)", "--api-key"] in rows
    assert ["context_length", "8192 (auto)", "default"] in rows
    assert ["dtype", "float32 (auto)", "default"] in rows
    assert ["page_size", "1", "default"] in rows
    assert "top-secret" not in out.getvalue()


def test_plan_is_shown_in_units_that_people_read() -> None:
    out = io.StringIO()
    memory: Any = SimpleNamespace(
        device="cpu",
        dtype="float32",
        weight_bytes=538_060_032,
        available_bytes=2 * 2**40,
        pool_bytes=2**20,
        kv_bytes_per_token=46_080,
        page_size=1,
        pages=46_603,
        tokens=46_603,
        context_length=2048,
        notes=("a \x1b note",),
    )
    plan.show_plan(memory, out)
    text = out.getvalue()
    assert "weights\t0.5 GiB\n" in text
    assert "available\t2,048.0 GiB\n" in text
    assert "page pool\tless than 0.1 GiB\n" in text
    assert "bytes per token\t46,080\n" in text
    assert "tokens that fit\t46,603\n" in text
    assert "note: a \\x1b note\n" in text


def test_a_terminal_gets_tables() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    resolved = resolve({"served_model_name": "[red]x"}, {}, None)
    plan.show_settings(resolved, resolved.settings, out)
    assert "Settings" in out.getvalue()
    assert "[red]x" in out.getvalue()


def test_a_fault_of_our_own_ends_with_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(**_: object) -> None:
        raise RuntimeError("broken\x1b")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.INTERNAL
    error = capsys.readouterr().err
    assert "RuntimeError: broken\\x1b" in error


def test_completions_and_man_pages_are_those_of_the_command_tree() -> None:
    generated = runpy.run_path(str(ROOT / "scripts" / "completions.py"))["generated"]()
    there = {path for path in generated if path.exists()}
    there |= {*(ROOT / "completions").iterdir(), *(ROOT / "docs" / "man").iterdir()}
    stale = [path.name for path in there if generated.get(path) != path.read_text()]
    assert not stale, "run `make completions`"
    assert there == set(generated)
    assert ROOT / "docs" / "man" / "ktserve-tenants-new.1" in generated


def test_the_command_prints_the_script_that_is_kept() -> None:
    for shell, name in (("bash", "ktserve.bash"), ("zsh", "_ktserve"), ("fish", "ktserve.fish")):
        done = invoke("completions", shell)
        assert done.exit_code == 0
        assert done.stdout == (ROOT / "completions" / name).read_text()
    assert invoke("completions", "tcsh").exit_code == ExitCode.USAGE


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_itself_reads_the_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    name = {"zsh": "_ktserve", "fish": "ktserve.fish"}[shell]
    script = str(ROOT / "completions" / name)
    subprocess.run([shell, "-n", script], check=True, timeout=30)
    if shell == "fish":
        program = f"source {script}; complete -C 'ktserve doc'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert done.stdout.startswith("doctor")


def test_a_doctor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("good", "python", "3.11"),
        Finding("bad", "model", "none\x1b[2J", "give MODEL"),
    ]
    monkeypatch.setattr(diagnosis, "examine", lambda _settings: iter(findings))
    done = invoke("doctor")
    assert done.exit_code == ExitCode.CHECK_FAILED
    assert "none\\x1b[2J" in done.stdout
    assert "-> give MODEL" in done.stdout
    assert "python" not in invoke("doctor", "--quiet").stdout
    shown = json.loads(invoke("doctor", "--json").stdout)
    assert [one["state"] for one in shown] == ["good", "bad"]
    findings.pop()
    assert invoke("doctor").exit_code == ExitCode.GOOD
    assert invoke("doctor", "no/such/model.gguf").exit_code == ExitCode.GOOD


def test_a_doctor_finds_a_model_that_is_not_there() -> None:
    by_name = {one.what: one for one in diagnosis.examine(Settings(model="./no-such-model"))}
    assert by_name["model"].state == "bad"
    assert by_name["model"].remedy
    assert by_name["torch"].state == "good"


def test_settings_table_is_that_of_the_declarations() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "settings_table.py"))
    assert page["PATH"].read_text() == page["document"](), "run `make docs`"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ktserve", "ru"], {"run"}),
        (["ktserve", "run", "--disable-r"], {"--disable-radix-cache"}),
        (["ktserve", "run", "--log-format", ""], {"text", "json"}),
        (["ktserve", "run", "--port", ""], set()),
        (["ktserve", "bench", "serve", "--endpoint", ""], {"chat", "completions"}),
        (["ktserve", "bench", "serve", "--workload", ""], {"ttft", "decode", "shared"}),
    ],
)
def test_bash_completes(words: list[str], offered: set[str]) -> None:
    program = (
        f"source {ROOT}/completions/ktserve.bash\n"
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ktserve; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", program, "bash", *words],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
        timeout=10,
    )
    assert set(done.stdout.split()) == offered
