"""`ktserve bench cache`: every operation is there, and what it times is really done."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from ktserve.bench.cache import Case, Plan, measure
from ktserve.bench.filled_forest import FilledForest
from ktserve.cli.bench import app


def filled(**changes) -> FilledForest:
    shape = {"nodes": 20, "page_size": 4, "namespaces": 3, "tenants": 1, "recorded": False}
    return FilledForest(**{**shape, "spare_tokens": 16_384, **changes})


def test_every_operation_is_measured_as_often_as_asked_for():
    plan = Plan(nodes=(20,), page_size=(4,), namespaces=(3,), prompt_tokens=(512,), repetitions=5)
    said: list[str] = []
    figures = list(measure(plan, said.append))
    counts = Counter(figure.name for figure in figures)
    once = {
        "evict 64 tokens, all used again before",
        "give back, evict 64 tokens, all used again before",
        "memory besides keys and page ids",
    }
    assert set(counts) == once | {
        *(
            f"{what}, 512 tokens, {lies}"
            for what in ("lookup", "lookup with page ids", "lock", "unlock", "lock and unlock")
            for lies in ("at once", "grown", "forked")
        ),
        "insert, 512 tokens",
        "split and lease, 512 tokens",
        "evict 64 tokens",
        "give back, evict 64 tokens",
        "request, 512 tokens, records off",
        "request, 512 tokens, records on",
        "records' part, request, 512 tokens",
    }
    assert all(counts[name] == (1 if name in once else 5) for name in counts)
    assert all(figure.value > 0 for figure in figures if figure.unit == "us")
    assert said


def test_only_what_is_asked_for_is_measured():
    plan = Plan(operations=("split",), nodes=(5,), prompt_tokens=(512,), repetitions=2)
    assert {figure.name for figure in measure(plan, lambda _: None)} == {
        "split and lease, 512 tokens"
    }


def test_each_further_value_is_a_forest_that_differs_in_it_alone():
    plan = Plan(nodes=(10, 20), page_size=(4, 8), records=("off", "on"), tenants=(1, 8))
    base = Case(nodes=10, page_size=4)
    assert plan.cases() == [
        base,
        Case(nodes=20, page_size=4),
        Case(nodes=10, page_size=8),
        Case(nodes=10, page_size=4, tenants=8),
        Case(nodes=10, page_size=4, records="on"),
    ]
    assert [case.differing(base) for case in plan.cases()] == [
        "",
        "nodes 20",
        "page size 8",
        "tenants 8",
        "records on",
    ]


def test_figures_say_of_which_forest_they_are():
    plan = Plan(
        operations=("evict",), nodes=(20, 40), tenants=(2, 8), page_size=(4,), repetitions=2
    )
    names = {figure.name for figure in measure(plan, lambda _: None)}
    assert {"evict 64 tokens", "evict 64 tokens [nodes 40]", "evict 64 tokens [tenants 8]"} < names


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_forked_conversation_is_a_node_a_turn_and_the_others_are_one(page_size):
    forest = filled(nodes=1, namespaces=1, page_size=page_size)
    prompts = forest.prompts(1024)
    nodes = {lies: forest.path_nodes(prompt) for lies, prompt in prompts.items()}
    assert nodes == {"at once": 1, "grown": 1, "forked": 4}


def test_a_longer_prompt_than_an_edge_is_split_within_one():
    # An edge ends in the middle of this prompt. What is timed checks that it splits one.
    list(filled(spare_tokens=16_384 * 3).insertions(16_384, 2))


def test_every_tenant_has_something_to_give_when_evictions_are_timed():
    # However much room is left beside the filling.
    forest = filled(nodes=32, tenants=8, spare_tokens=1_000_000)
    assert forest.givers() == 8
    list(forest.evictions(2))


def test_requests_are_timed_while_every_page_is_taken():
    forest = filled(nodes=40)
    forest.fill_up()
    assert forest.free_pages == 0
    forest.request(64, "request")
    assert forest.free_pages == 0


def test_memory_leaves_keys_and_page_ids_out():
    # A page a node or many: what is counted is the same.
    large, small = FilledForest.memory(16), FilledForest.memory(1)
    assert large.unit == "bytes/node"
    assert abs(large.value - small.value) < 16
    assert 200 < small.value < 600


def test_the_command_writes_what_it_measured(tmp_path):
    file = tmp_path / "cache.json"
    arguments = ["--nodes", "10", "--repetitions", "2", "--operation", "evict,insert"]
    arguments += ["--prompt-tokens", "512", "--json", str(file)]
    result = CliRunner().invoke(app, ["cache", *arguments])
    assert result.exit_code == 0, result.output
    assert "evict 64 tokens" in result.output
    written = json.loads(file.read_text())
    assert written["plan"]["nodes"] == [10]
    inserted = next(one for one in written["figures"] if one["name"] == "insert, 512 tokens")
    assert len(inserted["runs"]) == 2
    assert not any("lookup" in one["name"] for one in written["figures"])


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--operation", "lookup,lookups"], "--operation"),
        (["--operation", "lookup,lookup"], "--operation"),
        (["--records", "maybe"], "--records"),
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "ten"], "--nodes"),
        (["--nodes", "10,10"], "--nodes"),
        (["--page-size", "257"], "--page-size"),
        (["--prompt-tokens", "255"], "--prompt-tokens"),
        (["--tenants", ""], "--tenants"),
        (["--namespaces", "1,"], "--namespaces"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_its_flag(arguments, flag):
    result = CliRunner().invoke(app, ["cache", *arguments])
    assert result.exit_code == 2
    assert flag in result.output


def test_a_missing_directory_is_refused_before_anything_is_measured(tmp_path):
    result = CliRunner().invoke(app, ["cache", "--json", str(tmp_path / "none" / "x.json")])
    assert result.exit_code == 2
