"""`ktserve bench replay`: the traces as they are read, and what the cache makes of them."""

from __future__ import annotations

import json
import os
import runpy
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from ktserve.bench import replay as replaying
from ktserve.bench.replay import (
    SCANNER,
    NoPages,
    Plan,
    Replayed,
    Tally,
    Turn,
    best_possible,
    measure,
    quotas_of,
    replay,
    turns_of,
    with_scanner,
)
from ktserve.bench.replay_report import TraceReport
from ktserve.bench.traces import PAGE_TOKENS, Trace, TraceError, page_tokens, read_trace
from ktserve.cache.manager import CacheManager
from ktserve.cli.bench import app
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import TOKEN_BYTES, unpack

ROOT = Path(__file__).resolve().parents[2]
# Read before the fixture that takes ktserve's variables away.
DATA = Path(os.environ.get("KTSERVE_DATA", ROOT.parent / "shared" / "data"))
SESSIONS = DATA / "agent-sessions"
CONVERSATIONS = DATA / "mooncake" / "conversation_trace.jsonl"


def mooncake(directory: Path, *requests: tuple[int, list[int]]) -> Path:
    """A file of (milliseconds, block ids)."""
    file = directory / "chat.jsonl"
    file.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 1, "output_length": 1, "hash_ids": ids})
            + "\n"
            for at, ids in requests
        )
    )
    return file


def session(directory: Path, name: str, *requests: tuple[float, list[int]], **fields: Any) -> Path:
    """One agent session's file, of (seconds, block ids)."""
    directory.mkdir(exist_ok=True)
    file = directory / f"{name}.json"
    document = {
        "id": name,
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [{"t": t, "in": 1, "out": 1, "hash_ids": ids} for t, ids in requests],
    }
    file.write_text(json.dumps(document | fields))
    return file


def turn(tenant: str, *blocks: int, at: int = 0) -> Turn:
    """A request for these blocks."""
    ids = np.array(blocks, dtype=np.uint64)
    return Turn(at, tenant, page_tokens(ids) + bytes(TOKEN_BYTES), len(blocks))


def run(
    turns: Sequence[Turn], pages: int, sharing: Any = "shared", policy: Any = "lru"
) -> dict[str, Tally]:
    """Replay with equal weights."""
    quotas = {each.tenant: Quota() for each in turns}
    return replay(turns, pages=pages, sharing=sharing, policy=policy, quotas=quotas)


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["replay", *(str(each) for each in arguments)])


class TestTraces:
    def test_mooncake_roots_are_the_first_blocks_that_tell_prompts_apart(self, tmp_path):
        file = mooncake(tmp_path, (2500, [7, 8, 4, 5]), (0, [7, 8, 3]), (1000, [7, 8]))
        trace = read_trace(file)
        assert [request.at for request in trace.requests] == [0.0, 1.0, 2.5]
        assert [request.root for request in trace.requests] == ["3", "", "4"]
        assert trace.requests[2].blocks.tolist() == [7, 8, 4, 5]
        assert (trace.block_tokens, trace.own_clocks) == (512, False)

    def test_ids_of_one_session_are_not_those_of_another(self, tmp_path):
        session(tmp_path / "s", "a", (4.0, [1, 2, 3]), (0.0, [1, 2]))
        session(tmp_path / "s", "b", (0.0, [1, 2]))
        trace = read_trace(tmp_path / "s")
        short, long, other = trace.requests
        assert [request.root for request in trace.requests] == ["a", "a", "b"]
        assert (short.at, long.at) == (0.0, 4.0)
        assert long.blocks[:2].tolist() == short.blocks.tolist()
        assert not set(other.blocks.tolist()) & set(long.blocks.tolist())
        assert (trace.block_tokens, trace.own_clocks) == (64, True)

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("{", "line 2"),
            ('{"timestamp": 1}', "hash_ids"),
            ('{"timestamp": -1, "hash_ids": []}', "line 2"),
            ('{"timestamp": 1, "hash_ids": [-1]}', "line 2"),
            ('{"timestamp": 1, "hash_ids": ["x"]}', "line 2"),
            ('{"timestamp": 1, "hash_ids": [18446744073709551616]}', "2"),
            ("\xff", "line 2"),
        ],
    )
    def test_a_bad_line_is_named(self, line: str, problem: str, tmp_path):
        file = mooncake(tmp_path, (0, [1]))
        file.write_bytes(file.read_bytes() + line.encode("latin-1") + b"\n")
        with pytest.raises(TraceError, match=r"chat\.jsonl") as caught:
            read_trace(file)
        assert problem in str(caught.value)

    @pytest.mark.parametrize(
        ("fields", "problem"),
        [
            ({"hash_id_scope": "global"}, "hash_id_scope"),
            ({"requests": 3}, "requests"),
            ({"block_size": 0}, "block_size"),
            ({"block_size": 128}, "blocks of 128 tokens"),
            ({"id": "a"}, "has the id of a.json"),
        ],
    )
    def test_an_odd_session_is_named(self, fields: dict[str, Any], problem: str, tmp_path):
        session(tmp_path / "s", "a", (0.0, [1]))
        session(tmp_path / "s", "b", (0.0, [1]))
        read_trace(tmp_path / "s")
        session(tmp_path / "s", "b", (0.0, [1]), **fields)
        with pytest.raises(TraceError, match=r"b\.json") as caught:
            read_trace(tmp_path / "s")
        assert problem in str(caught.value)

    def test_what_has_nothing_to_replay_is_refused(self, tmp_path):
        (tmp_path / "none.jsonl").write_text("\n")
        (tmp_path / "empty").mkdir()
        session(tmp_path / "silent", "a")
        for name in ("none.jsonl", "empty", "silent", "absent"):
            with pytest.raises(TraceError, match=name):
                read_trace(tmp_path / name)

    def test_a_block_has_the_same_tokens_wherever_it_stands(self):
        ids = np.array([0, 1, 2, 2**64 - 1, 1], dtype=np.uint64)
        pages = unpack(page_tokens(ids)).reshape(len(ids), PAGE_TOKENS)
        assert pages[1].tolist() == pages[4].tolist()
        assert len({tuple(page) for page in pages.tolist()}) == 4
        assert (pages >= 0).all()
        many = unpack(page_tokens(np.arange(100_000, dtype=np.uint64))).reshape(-1, PAGE_TOKENS)
        assert len(np.unique(many, axis=0)) == 100_000


class TestTurns:
    def trace(self, directory: Path, sessions: int = 12) -> Trace:
        for number in range(sessions):
            session(directory / "s", f"s{number:02}", (0.0, [1]), (60.0, [1, 2]))
        return read_trace(directory / "s")

    def test_sessions_begin_within_the_spread_and_keep_their_own_time(self, tmp_path):
        turns = turns_of(self.trace(tmp_path), Plan(pages=(1,), spread=100, tenants=0), seed=0)
        assert [each.at for each in turns] == sorted(each.at for each in turns)
        begun: dict[str, int] = {}
        for each in turns:
            first = begun.setdefault(each.tenant, each.at)
            assert each.at in (first, first + 60_000_000_000)
        assert len(set(begun.values())) == 12
        assert 0 <= min(begun.values()) < max(begun.values()) <= 100_000_000_000

    def test_mooncakes_time_is_left_as_it_is(self, tmp_path):
        trace = read_trace(mooncake(tmp_path, (0, [1]), (250, [2])))
        turns = turns_of(trace, Plan(pages=(1,), spread=100), seed=3)
        assert [each.at for each in turns] == [0, 250_000_000]

    def test_a_prompt_that_comes_again_is_found_to_its_last_block(self, tmp_path):
        trace = read_trace(mooncake(tmp_path, (0, [1, 2]), (1, [1, 2])))
        tallies = run(turns_of(trace, Plan(pages=(1,), tenants=1), seed=0), pages=4)
        assert tallies["t1"].found == 2

    def test_roots_are_dealt_out_evenly_and_by_the_seed(self, tmp_path):
        trace = self.trace(tmp_path)

        def dealt(seed: int, tenants: int) -> list[str]:
            plan = Plan(pages=(1,), spread=0, tenants=tenants)
            return [each.tenant for each in turns_of(trace, plan, seed)]

        assert {name: dealt(0, 4).count(name) for name in dealt(0, 4)} == {
            f"t{number}": 6 for number in range(1, 5)
        }
        assert dealt(0, 4) == dealt(0, 4) != dealt(1, 4)
        assert len(set(dealt(0, 0))) == 12

    def test_the_scanner_asks_in_the_middle_half_for_what_nobody_asked_before(self):
        quiet = [turn("a", *range(number, number + 3), at=number) for number in range(40)]
        both = with_scanner(quiet, scans=2)
        assert [each for each in both if each.tenant != SCANNER] == quiet
        scans = [each for each in both if each.tenant == SCANNER]
        assert len(scans) == 40
        assert {each.at for each in scans} == set(range(10, 30))
        assert {each.pages for each in scans} == {3}
        assert run(both, pages=1000)[SCANNER].found == 0

    def test_the_scanner_has_its_share_of_the_weights(self):
        quotas = quotas_of([turn("a", 1), turn("b", 1), turn(SCANNER, 1)], 0.25)
        total = sum(quota.weight for quota in quotas.values())
        assert quotas["a"].weight == quotas["b"].weight
        assert quotas[SCANNER].weight / total == pytest.approx(0.25)
        assert quotas_of([turn("a", 1)], 0.25) == {"a": Quota()}


class TestReplay:
    def test_what_was_there_before_is_found_in_whole_pages(self):
        tally = run([turn("a", 1, 2, 3), turn("a", 1, 2, 4), turn("a", 1, 2, 3)], pages=10)["a"]
        assert (tally.requests, tally.asked, tally.found) == (3, 9, 0 + 2 + 3)
        assert tally.evicted_by == {}

    def test_tenants_find_nothing_of_each_others(self):
        tallies = run([turn("a", 1, 2), turn("b", 1, 2), turn("b", 1, 2)], pages=10)
        assert (tallies["a"].found, tallies["b"].found) == (0, 2)

    def test_losses_are_counted_by_whose_request_took_them(self):
        tallies = run([turn("a", 1, 2, 3), turn("b", 4, 5), turn("b", 6, 7)], pages=4)
        assert tallies["a"].evicted_by == {"b": 3}
        assert tallies["b"].evicted_by == {}
        replayed = Replayed(4, "shared", "lru", False, 0, tallies)
        assert replayed.lost_to_others == 3

    def test_the_best_possible_is_what_no_pool_beats(self):
        turns = [turn("a", number % 7, 100 + number % 7) for number in range(70)]
        best = best_possible(turns)
        assert best == pytest.approx(0.9)
        rates = [run(turns, pages)["a"].hit_rate for pages in (4, 12, 14)]
        assert rates == sorted(rates)
        assert rates[0] < best
        assert rates[-1] == pytest.approx(best)

    def test_what_is_too_long_for_a_tenant_is_cut_and_counted(self):
        turns = [turn("a", *range(8)), turn("a", *range(8)), turn("b", 1)]
        cut = run(turns, pages=10, sharing="partitioned")["a"]
        assert (cut.asked, cut.found, cut.cut_requests, cut.cut) == (16, 5, 2, 6)
        whole = run(turns, pages=10, sharing="shared")["a"]
        assert (whole.asked, whole.found, whole.cut_requests, whole.cut) == (16, 8, 0, 0)

    def test_each_policy_reaches_the_cache(self):
        order = [1, 1, 1, 3, 2, 6, 6, 3, 3, 5, 2, 5, 1, 5]  # found by a search for four answers
        turns = [turn("a", block, at=at) for at, block in enumerate(order)]
        found = {p: run(turns, 3, policy=p)["a"].found for p in ("lru", "lfu", "slru", "fifo")}
        assert found == {"lru": 7, "lfu": 6, "slru": 4, "fifo": 8}

    def test_floors_keep_a_scanner_from_what_others_come_back_for(self):
        work = [
            turn(tenant, base, base + 1, base + 2, at=number)
            for number, (tenant, base) in enumerate([("a", 0), ("b", 100)] * 40)
        ]
        scanned = with_scanner(work, scans=3)

        def rate(turns: Sequence[Turn], sharing: Any) -> float:
            quotas = quotas_of(turns, 0.1)
            tallies = replay(turns, pages=14, sharing=sharing, policy="lru", quotas=quotas)
            return Replayed(14, sharing, "lru", True, 0, tallies).hit_rate

        assert rate(work, "shared") == rate(work, "floors") > 0.9
        assert rate(scanned, "shared") < 0.6
        assert rate(scanned, "floors") > 0.9

    def test_partitions_are_not_touched_by_what_others_do(self):
        work = [turn("a", n % 5, 10 + n % 3, at=n) for n in range(50)]
        noise = [turn("b", 1000 + n, at=n) for n in range(50)]
        mixed = [each for pair in zip(work, noise, strict=True) for each in pair]
        quotas = {"a": Quota(), "b": Quota()}

        def of_a(turns: Sequence[Turn], sharing: Any) -> Tally:
            return replay(turns, pages=16, sharing=sharing, policy="lru", quotas=quotas)["a"]

        assert of_a(mixed, "partitioned") == of_a(work, "partitioned")
        assert of_a(mixed, "shared") != of_a(work, "shared")

    def test_the_clock_is_the_traces(self, monkeypatch):
        read: list[int] = []

        def manager(*arguments: Any, clock: Callable[[], int], **options: Any) -> CacheManager:
            def noted() -> int:
                read.append(clock())
                return clock()

            return CacheManager(*arguments, clock=noted, **options)

        monkeypatch.setattr(replaying, "CacheManager", manager)
        run([turn("a", 1, at=10), turn("a", 2, at=70_000)], pages=4)
        assert {10, 70_000} <= set(read) <= {0, 10, 70_000}

    def test_shares_of_no_page_are_refused_with_the_remedy(self):
        turns = [turn(f"t{number}", 1) for number in range(5)]
        with pytest.raises(NoPages, match=r"4, partitioned.* 5 tenants.*--tenants"):
            run(turns, pages=4, sharing="partitioned")
        run(turns, pages=5, sharing="partitioned")


class TestReport:
    def replays(self) -> Iterator[Replayed]:
        for seed in (0, 1):
            for scanner in (False, True):
                tallies = {"a": Tally(requests=4, asked=10, found=8 - 4 * scanner - seed)}
                if scanner:
                    tallies["a"].evicted_by = {SCANNER: 2 + seed, "a": 50}
                    tallies[SCANNER] = Tally(requests=9, asked=1000)
                yield Replayed(12_000, "floors", "lru", scanner, seed, tallies)

    def test_means_and_spread_leave_the_scanner_out(self):
        report = TraceReport(Trace("one\x1b[2J", 64, False, []), 0.9, list(self.replays()))
        table = report.table()
        assert "\x1b" not in table
        row = next(line for line in table.splitlines() if "12,000" in line)
        assert "75.0 (70.0..80.0)  35.0 (30.0..40.0)  0 / 2" in row
        assert "90.0%" in table
        assert "a        80.0 / 40.0" in table
        document = report.document()
        assert [r["hit_rate"] for r in document["replays"]] == [0.8, 0.4, 0.7, 0.3]
        assert document["replays"][3]["tenants"]["a"]["evicted_by"] == {SCANNER: 3, "a": 50}
        json.dumps(document)


class TestCommand:
    def test_every_way_is_replayed_and_written(self, tmp_path):
        file = mooncake(tmp_path, *((n, [0, n % 9, 50 + n % 9]) for n in range(60)))
        session(tmp_path / "s", "a", (0.0, [1, 2]), (9.0, [1, 2, 3]))
        out = tmp_path / "out.json"
        result = invoke(
            *(file, tmp_path / "s", "--pages", "20,40", "--sharing", "floors,shared"),
            *("--policy", "fifo", "--tenants", 2, "--seeds", 2, "--json", out),
        )
        assert result.exit_code == 0, result.output
        assert "chat.jsonl: 60 requests, 9 roots" in result.output
        assert "s: 2 requests, 1 roots" in result.output
        written = json.loads(out.read_text())
        assert [trace["name"] for trace in written["traces"]] == ["chat.jsonl", "s"]
        ways = [
            (r["pages"], r["sharing"], r["policy"], r["scanner"], r["seed"])
            for r in written["traces"][0]["replays"]
        ]
        assert sorted(ways) == [
            (pages, sharing, "fifo", scanner, seed)
            for pages in (20, 40)
            for sharing in ("floors", "shared")
            for scanner in (False, True)
            for seed in (0, 1)
        ]
        for each in written["traces"][0]["replays"]:
            assert each["scanner"] == (SCANNER in each["tenants"])
        assert written["plan"]["scans"] == 2
        assert written["stopped"] is None

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("--pages", "0"), "--pages"),
            (("--pages", "8,8"), "--pages"),
            (("--pages", "many"), "--pages"),
            (("--pages", "1", "--sharing", "partitioned"), "--pages: 1, partitioned"),
            (("--policy", "priority"), "--policy"),
            (("--sharing", "floors,floors"), "--sharing"),
            (("--json", "/nowhere/x.json"), "--json"),
        ],
    )
    def test_a_bad_option_is_refused_by_name(self, arguments, problem, tmp_path):
        file = mooncake(tmp_path, (0, [1]), (1, [2]))
        result = invoke(file, *arguments)
        assert result.exit_code == 2
        assert problem in result.output
        assert invoke(file, "--pages", "10").exit_code == 0

    def test_a_trace_that_is_not_there_is_refused_before_anything_is_replayed(self, tmp_path):
        result = invoke(mooncake(tmp_path, (0, [1])), tmp_path / "gone")
        assert result.exit_code == 2
        assert "gone is not there" in result.output
        assert "seed 0" not in result.output

    def test_what_there_is_at_an_interrupt_is_shown(self, tmp_path, monkeypatch):
        file = mooncake(tmp_path, (0, [1]), (1, [1]))
        real = replaying.measure

        def interrupted(*arguments: Any) -> Iterator[Replayed]:
            yield next(real(*arguments))
            raise KeyboardInterrupt

        monkeypatch.setattr(replaying, "measure", interrupted)
        out = tmp_path / "out.json"
        result = invoke(file, "--json", out)
        assert result.exit_code == 4
        assert "shared" in result.output
        written = json.loads(out.read_text())
        assert written["stopped"] == "interrupted"
        assert len(written["traces"][0]["replays"]) == 1


class TestFigure:
    def test_a_row_stands_where_its_rates_are_on_an_axis_from_nothing_to_all(self, tmp_path):
        replays = [
            {"pages": 9, "sharing": sharing, "policy": "lru", "scanner": scanner, "hit_rate": rate}
            for sharing, rates in {"shared": (0.75, 0.25), "floors": (0.75, 0.5)}.items()
            for scanner, rate in zip((False, True), rates, strict=True)
        ]
        traces = [{"name": "a<b.jsonl", "block_tokens": 64, "best": 1.0, "replays": replays}]
        file = tmp_path / "replay.json"
        file.write_text(json.dumps({"traces": traces}))
        script = runpy.run_path(str(ROOT / "scripts" / "replay_figure.py"))
        drawing = ElementTree.fromstring(script["svg"](list(script["read"]([file]))))
        assert "a<b, 9 pages of 64 tokens" in {element.text for element in drawing.iter()}
        of = {
            kind: [e for e in drawing.iter() if e.get("class") == kind]
            for kind in ("grid", "quiet", "scanner")
        }
        left, *_, right = (float(line.attrib["x1"]) for line in of["grid"][:6])

        def percent(circle: ElementTree.Element) -> float:
            return 100 * (float(circle.attrib["cx"]) - left) / (right - left)

        # The first of each is the legend's, the last the policies'.
        assert [percent(e) for e in of["quiet"][1:3]] == pytest.approx([75, 75], abs=0.1)
        assert [percent(e) for e in of["scanner"][1:3]] == pytest.approx([25, 50], abs=0.1)


def rates(trace: Path, plan: Plan) -> dict[tuple[str, bool], float]:
    """Mean hit rates in percent, by mode and whether the scanner was there."""
    if not trace.exists():
        pytest.skip(f"{trace} is not here; KTSERVE_DATA names the directory of the public traces")
    found: dict[tuple[str, bool], list[float]] = {}
    for each in measure(read_trace(trace), plan, lambda _: None):
        found.setdefault((each.sharing, each.scanner), []).append(100 * each.hit_rate)
    return {way: statistics.fmean(values) for way, values in found.items()}


def test_the_agent_sessions_give_the_figures_of_the_documents():
    found = rates(SESSIONS, Plan(pages=(24_000,), seeds=1))
    assert found["shared", False] == pytest.approx(83.2, abs=0.5)
    assert found["shared", True] == pytest.approx(61.8, abs=0.5)
    assert found["floors", False] == pytest.approx(found["shared", False], abs=1.0)
    assert found["floors", True] > found["shared", True] + 15
    assert found["partitioned", False] < found["floors", False]


@pytest.mark.slow
def test_the_conversations_give_the_figures_of_the_documents():
    found = rates(CONVERSATIONS, Plan(pages=(10_000,), sharing=("shared", "floors"), seeds=1))
    assert found["shared", False] == pytest.approx(21.2, abs=0.3)
    assert found["shared", True] == pytest.approx(14.5, abs=0.5)
    assert found["floors", True] > 18
