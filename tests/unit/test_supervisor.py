from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ktserve.banner import banner_rows, exposure_warning, print_banner
from ktserve.config import Settings
from ktserve.messages import EngineInfo
from ktserve.supervisor.checks import CannotStart, check
from ktserve.supervisor.restarts import RestartPolicy, RestartRules

SUPERVISED = Path(__file__).parents[1] / "fakes" / "supervised.py"
LIMIT_S = 20.0


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s} s"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Server:
    """A supervisor over the fake children, in a process of its own."""

    def __init__(self, root: Path, engine: str, api: str, **settings: object) -> None:
        root.mkdir(exist_ok=True)
        self.runtime_dir = root / "run"
        self._out, self._err = root / "out", root / "err"
        settings = {"runtime_dir": str(self.runtime_dir), **settings}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(SUPERVISED), json.dumps(settings), engine, api],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def log(self) -> str:
        return self._err.read_text()

    def pids(self, role: str) -> list[int]:
        """The process ids of the lives of ``role`` that became ready, oldest first."""
        return [int(pid) for pid in re.findall(rf"the {role} is ready \(process (\d+)\)", self.log)]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.out}\n{self.log}") from None

    def logs(self, text: str) -> None:
        self.wait(lambda: text in self.log, f"{text!r} in the log")

    def ready(self, role: str, lives: int) -> int:
        self.wait(lambda: len(self.pids(role)) >= lives, f"{role} ready for time {lives}")
        return self.pids(role)[lives - 1]

    def ask(self, tokens: int) -> socket.socket:
        """Begin a request of ``tokens`` tokens, or one that is held with 0."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(LIMIT_S)
        connection.connect(str(self.runtime_dir / "control.sock"))
        connection.sendall(f"{tokens}\n".encode())
        return connection

    def serves(self) -> None:
        """Wait until requests are answered: the API hears of a ready engine a moment later than
        the log."""
        self.wait(lambda: answer(self.ask(2)) == ["0", "1", "end"], "answer")

    def hold(self) -> socket.socket:
        """A request that is in flight for certain: one that came later was answered."""
        held = self.ask(0)
        assert answer(self.ask(1)) == ["0", "end"]
        return held

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(LIMIT_S)


def answer(connection: socket.socket) -> list[str]:
    with connection, connection.makefile() as lines:
        return lines.read().splitlines()


@contextlib.contextmanager
def server(
    root: Path, *, engine: str = "serve", api: str = "serve", **settings: object
) -> Iterator[Server]:
    """A server; afterwards nothing of it may be left."""
    running = Server(root, engine, api, **settings)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        pids = running.pids("engine") + running.pids("api")
        wait_until(lambda: not any(alive(pid) for pid in pids), f"end of {pids}", 5)


@contextlib.contextmanager
def ready_server(root: Path, **options: object) -> Iterator[Server]:
    with server(root, **options) as running:  # type: ignore[arg-type]
        running.wait(lambda: "sockets: " in running.out, "banner")
        running.serves()
        yield running


def test_serves_and_prints_the_banner_once_ready(socket_dir: Path) -> None:
    with ready_server(socket_dir) as running:
        assert answer(running.ask(3)) == ["0", "1", "2", "end"]
        assert running.out.splitlines() == [
            "ktserve is ready",
            "model: fake (FakeForCausalLM)",
            "device: cpu, attention: torch",
            "precision: float32",
            "pool: 4,096 tokens in 1,024 pages of 4",
            "context: 128 tokens",
            "cache: floors (a floor for each tenant), eviction: lru",
            "tenants: one tenant, no key",
            "URL: http://127.0.0.1:30000/v1",
            f"sockets: {running.runtime_dir}",
        ]
        assert "WARNING" not in running.log


def test_terminal_signals_reach_the_supervisor_alone(socket_dir: Path) -> None:
    with ready_server(socket_dir) as running:
        groups = {os.getpgid(running.ready(role, 1)) for role in ("engine", "api")}
        assert os.getpgid(running.process.pid) not in groups


def test_killed_engine_answers_503_and_comes_back(socket_dir: Path) -> None:
    with ready_server(socket_dir) as running:
        held = running.hold()
        os.kill(running.ready("engine", 1), signal.SIGKILL)
        (line,) = answer(held)
        assert line.startswith("error 503 engine_lost")
        assert "SIGKILL (out of memory?)" in line
        running.logs("was killed by SIGKILL (out of memory?); starting it again")
        running.ready("engine", 2)
        running.serves()
        assert len(list(running.runtime_dir.glob("engine-*.ipc"))) == 1
        assert running.out.count("ktserve is ready") == 1


def test_killed_api_comes_back_and_hears_of_the_ready_engine(socket_dir: Path) -> None:
    with ready_server(socket_dir) as running:
        held = running.hold()
        os.kill(running.ready("api", 1), signal.SIGKILL)
        assert answer(held) == []
        running.ready("api", 2)
        running.serves()
        assert len(running.pids("engine")) == 1


def test_port_that_the_system_chose_is_kept_by_the_next_api(socket_dir: Path) -> None:
    with ready_server(socket_dir, port=0) as running:
        os.kill(running.ready("api", 1), signal.SIGKILL)
        running.ready("api", 2)
        first, second = re.findall(r"^port (\d+)$", running.log, re.MULTILINE)
        assert first == second
        assert f"URL: http://127.0.0.1:{first}/v1" in running.out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_idle_server_ends_well_on_a_signal(socket_dir: Path, number: signal.Signals) -> None:
    with ready_server(socket_dir) as running:
        running.signal(number)
        assert running.exit_code() == 0
        assert f"{number.name}: draining" in running.log
        assert "killing" not in running.log
        assert not any(path.is_socket() for path in running.runtime_dir.iterdir())


def test_drain_waits_for_what_is_in_flight_and_refuses_the_rest(socket_dir: Path) -> None:
    with ready_server(socket_dir) as running:
        held = running.hold()
        running.signal(signal.SIGTERM)
        running.logs("draining")
        wait_until(lambda: answer(running.ask(1))[0].startswith("error 503 draining"), "refusal")
        assert running.process.poll() is None
        os.kill(running.ready("engine", 1), signal.SIGKILL)
        assert answer(held)[0].startswith("error 503 engine_lost")
        assert running.exit_code() == 0
        assert len(running.pids("engine")) == 1, "nothing is started again while draining"


def test_killed_api_ends_the_drain(socket_dir: Path) -> None:
    with ready_server(socket_dir) as running:
        held = running.hold()
        running.signal(signal.SIGTERM)
        running.logs("draining")
        os.kill(running.ready("api", 1), signal.SIGKILL)
        assert answer(held) == []
        assert running.exit_code() == 0
        assert "the api was killed by SIGKILL (out of memory?) while draining" in running.log


def test_drain_timeout_cuts_off_with_a_clear_error(socket_dir: Path) -> None:
    with ready_server(socket_dir, drain_timeout=0.1) as running:
        held = running.hold()
        running.signal(signal.SIGTERM)
        assert "the server stopped" in answer(held)[0]
        assert running.exit_code() == 1
        assert "still in flight after --drain-timeout 0.1 s" in running.log


def test_without_drain_timeout_stops_at_once_and_well(socket_dir: Path) -> None:
    with ready_server(socket_dir, drain_timeout=0) as running:
        running.hold().close()
        running.signal(signal.SIGTERM)
        assert running.exit_code() == 0


def test_second_signal_stops_at_once(socket_dir: Path) -> None:
    with ready_server(socket_dir, engine="deaf", api="deaf") as running:
        held = running.hold()
        running.signal(signal.SIGINT)
        running.logs("draining")
        began = time.monotonic()
        running.signal(signal.SIGINT)
        assert running.exit_code() == 1
        assert time.monotonic() - began < 3
        assert answer(held) == []
        assert "SIGINT while stopping: killing" in running.log


@pytest.mark.slow
def test_child_that_does_not_stop_is_killed(socket_dir: Path) -> None:
    with ready_server(socket_dir, engine="deaf") as running:
        running.signal(signal.SIGTERM)
        assert running.exit_code() == 0
        assert "the engine did not stop in 5 s; killing it" in running.log


@pytest.mark.parametrize("mode", ["serve", "deaf"])
def test_no_child_survives_a_killed_supervisor(socket_dir: Path, mode: str) -> None:
    with ready_server(socket_dir, engine=mode, api=mode) as running:
        pids = running.pids("engine") + running.pids("api")
        assert [alive(pid) for pid in pids] == [True, True]
        running.signal(signal.SIGKILL)
        running.process.wait()
        wait_until(lambda: not any(alive(pid) for pid in pids), "end of both children", 3)


def test_next_server_takes_over_what_a_killed_one_left(socket_dir: Path) -> None:
    with ready_server(socket_dir) as running:
        running.signal(signal.SIGKILL)
        running.process.wait()
        with ready_server(socket_dir) as following:
            assert answer(following.ask(1)) == ["0", "end"]


def test_second_server_of_the_same_name_is_refused(socket_dir: Path) -> None:
    with ready_server(socket_dir) as running:
        path = str(running.runtime_dir)
        with server(socket_dir / "second", runtime_dir=path) as second:
            assert second.exit_code() == 2
            assert "another --name" in second.log
        assert answer(running.ask(1)) == ["0", "end"]


def test_bad_file_of_tenants_is_refused_before_anything_starts(socket_dir: Path) -> None:
    (socket_dir / "tenants.toml").write_text("tenants = 1")
    with server(socket_dir, tenants=str(socket_dir / "tenants.toml")) as running:
        assert running.exit_code() == 2
        assert "tenants" in running.log
        assert not running.runtime_dir.exists()


def test_engine_that_says_why_it_cannot_start_ends_the_server(socket_dir: Path) -> None:
    with server(socket_dir, engine="fail") as running:
        assert running.exit_code() == 2
        assert "the engine cannot go on: --model-path names no model; give a" in running.log
        assert "starting it again" not in running.log
        assert running.out == ""


def test_engine_that_never_starts_is_given_up(socket_dir: Path) -> None:
    with server(socket_dir, engine="die") as running:
        assert running.exit_code() == 70
        assert running.log.count("the engine (process") == 2
        assert "exited with code 3; it died 3 times in a row" in running.log


def test_signal_while_the_engine_starts_again_ends_the_server(socket_dir: Path) -> None:
    with server(socket_dir, engine="die") as running:
        running.logs("starting it again")
        running.signal(signal.SIGTERM)
        assert running.exit_code() == 0


class TestRestartPolicy:
    def policy(self) -> RestartPolicy:
        return RestartPolicy(RestartRules())

    def test_waits_twice_as_long_up_to_a_bound(self) -> None:
        policy = self.policy()
        delays = [policy.after_death(1.0) for _ in range(9)]
        assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]

    def test_healthy_life_starts_the_back_off_anew(self) -> None:
        policy = self.policy()
        assert [policy.after_death(s) for s in (1, 1, 59, 60, 1)] == [0.5, 1, 2, 0.5, 1]

    def test_gives_up_after_five_lives_that_were_never_ready(self) -> None:
        policy = self.policy()
        assert [policy.after_death(None) for _ in range(5)] == [0.5, 1, 2, 4, None]

    def test_ready_life_in_between_counts_anew(self) -> None:
        policy = self.policy()
        lives = [None, None, None, None, 0.1, None, None, None, None]
        assert None not in [policy.after_death(ready) for ready in lives]


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (Settings(host="0.0.0.0"), True),
        (Settings(host="::"), True),
        (Settings(host="example.org"), True),
        (Settings(host="127.0.0.1"), False),
        (Settings(host="127.8.0.1"), False),
        (Settings(host="::1"), False),
        (Settings(host="localhost"), False),
        (Settings(host="0.0.0.0", api_key="k"), False),
        (Settings(host="0.0.0.0", tenants="t.toml"), False),
    ],
)
def test_exposure_without_a_key_is_warned_of(settings: Settings, warned: bool) -> None:
    assert (exposure_warning(settings) is not None) == warned


def info(model: str) -> EngineInfo:
    return EngineInfo(
        model=model,
        architecture="A",
        device="cpu",
        dtype="float32",
        attention_backend="torch",
        context_length=1,
        page_size=1,
        pool_tokens=1,
        capacity_tokens={},
        kv_bytes_per_token=1,
        weight_bytes=1,
        vocab_size=1,
        eos_token_ids=(),
        max_running_requests=1,
        max_queued_requests=1,
    )


def test_banner_cannot_be_driven_by_a_models_name() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    rows = banner_rows(
        info("evil\x1b[2J[red]\n"), Settings(tenants="t.toml"), "http://h:1", 3, Path("/r")
    )
    for out in (io.StringIO(), Terminal()):
        print_banner(rows, out)
        assert r"evil\x1b[2J[red]\x0a" in out.getvalue()
        assert "\x1b[2J" not in out.getvalue()
        assert "3, by API key" in out.getvalue()


@pytest.mark.parametrize(
    ("url", "rows"),
    [
        ("http://127.0.0.1:30000", [("URL", "http://127.0.0.1:30000/v1")]),
        ("https://example.org:1", [("URL", "https://example.org:1/v1")]),
        (
            "http://0.0.0.0:30000",
            [
                ("URL", "http://127.0.0.1:30000/v1"),
                ("listening", "on all addresses of this machine (0.0.0.0)"),
            ],
        ),
        (
            "https://[::]:1",
            [
                ("URL", "https://[::1]:1/v1"),
                ("listening", "on all addresses of this machine (::)"),
            ],
        ),
    ],
)
def test_banner_has_an_address_that_can_be_used(url: str, rows: list[tuple[str, str]]) -> None:
    shown = banner_rows(info("m"), Settings(), url, 1, Path("/r"))
    assert [row for row in shown if row[0] in ("URL", "listening")] == rows


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            Settings(cache_sharing="partitioned", radix_eviction_policy="priority"),
            "partitioned (fixed parts), eviction: priority",
        ),
        (
            Settings(cache_sharing="shared", radix_eviction_policy="slru"),
            "shared (one order over all tenants), eviction: slru",
        ),
        (Settings(disable_radix_cache=True), "off, every prompt is computed in full"),
    ],
)
def test_banner_says_how_the_cache_is_shared(settings: Settings, text: str) -> None:
    rows = banner_rows(info("m"), settings, "http://127.0.0.1:1", 1, Path("/r"))
    assert dict(rows)["cache"] == text


def test_certificate_that_cannot_be_used_is_refused_before_anything_is_started(
    tmp_path: Path,
) -> None:
    no_certificate = tmp_path / "cert.pem"
    no_certificate.write_text("no certificate")
    with pytest.raises(CannotStart, match="--ssl-certfile"):
        check(Settings(ssl_certfile=str(no_certificate)))
    assert len(check(Settings()).entries) == 1
