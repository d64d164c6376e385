"""The prefix cache alone, without a model: what its operations cost.

Every operation is timed by itself on a forest that was filled before, and the median of its
repetitions is the figure: a collection or an interrupt in between does not count, its greatest
value shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from ktserve.bench.filled_forest import FilledForest
from ktserve.bench.workloads import Figure

Operation = Literal["lookup", "insert", "split", "lock", "evict", "request", "memory"]
Records = Literal["off", "on"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One forest.

    Attributes:
        nodes: that fill it before anything is timed, one for each prompt.
        page_size: tokens a page.
        namespaces: over which these are spread, one each in turn.
        tenants: whose the namespaces are, of equal weight, in the mode ``floors``.
        records: whether changes are recorded.
    """

    nodes: int = 100_000
    page_size: int = 16
    namespaces: int = 1
    tenants: int = 1
    records: Records = "off"

    def differing(self, other: Case) -> str:
        """What is not as in ``other``, for the names of figures."""
        ours = {one.name: getattr(self, one.name) for one in fields(self)}
        return ", ".join(
            f"{name.replace('_', ' ')} {value}"
            for name, value in ours.items()
            if value != getattr(other, name)
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    The first value of each list makes the first case. Each further value is a case that differs
    from it in this one thing, so that a long list costs its length and not a product.

    Attributes:
        operations: any of `Operation`, in any order.
        prompt_tokens: lengths of the prompts that are timed.
        repetitions: of each operation.
    """

    operations: tuple[Operation, ...] = get_args(Operation)
    prompt_tokens: tuple[int, ...] = (512, 8192, 131_072)
    nodes: tuple[int, ...] = (100_000,)
    page_size: tuple[int, ...] = (16,)
    namespaces: tuple[int, ...] = (1,)
    tenants: tuple[int, ...] = (1,)
    records: tuple[Records, ...] = ("off",)
    repetitions: int = 50

    def cases(self) -> list[Case]:
        """The forests, the one that the others are compared with first."""
        base = Case(**{one.name: getattr(self, one.name)[0] for one in fields(Case)})
        return [base] + [
            replace(base, **{one.name: value})
            for one in fields(Case)
            for value in getattr(self, one.name)[1:]
        ]


def measure(plan: Plan, progress: Callable[[str], None]) -> Iterator[Figure]:
    """A figure for each repetition of each operation, forest by forest."""
    base, *_ = cases = plan.cases()
    for case in cases:
        differing = case.differing(base)
        progress(f"filling a forest with {case.nodes:,} nodes{differing and f' ({differing})'}")
        for figure in _figures(case, plan, progress):
            yield replace(figure, name=figure.name + (differing and f" [{differing}]"))


def _figures(case: Case, plan: Plan, progress: Callable[[str], None]) -> Iterator[Figure]:
    wanted, often = plan.operations, plan.repetitions
    forest = _filled(case, plan, recorded=case.records == "on")
    for tokens in plan.prompt_tokens:
        progress(f"prompts of {tokens:,} tokens")
        for lies, prompt in forest.prompts(tokens).items():
            if "lookup" in wanted:
                yield from forest.lookups(prompt, f"{tokens:,} tokens, {lies}", often)
            if "lock" in wanted:
                yield from forest.locks(prompt, f"{tokens:,} tokens, {lies}", often)
        if "insert" in wanted or "split" in wanted:
            kinds = [kind for kind in ("insert", "split") if kind in wanted]
            for figure in forest.insertions(tokens, often):
                if figure.name.startswith(tuple(kinds)):
                    yield figure
    if "evict" in wanted:
        progress("eviction")
        yield from forest.evictions(often)
    if "request" in wanted:
        progress("whole requests, with records and without")
        del forest
        pair = [_filled(case, plan, recorded=recorded) for recorded in (False, True)]
        for tokens in plan.prompt_tokens:
            yield from _requests(pair, tokens, often)
    if "memory" in wanted:
        progress("memory")
        yield FilledForest.memory(case.page_size)


def _filled(case: Case, plan: Plan, *, recorded: bool) -> FilledForest:
    return FilledForest(
        nodes=case.nodes,
        page_size=case.page_size,
        namespaces=case.namespaces,
        tenants=case.tenants,
        recorded=recorded,
        # What is timed: three prompts that lie there, and the insertions.
        spare_tokens=sum(plan.prompt_tokens) * (plan.repetitions + 4),
    )


def _requests(pair: list[FilledForest], tokens: int, repetitions: int) -> Iterator[Figure]:
    """Whole requests without records and with them, on two forests that are alike.

    They come in turn, so that a change of the machine's speed meets both.
    """
    for forest in pair:
        forest.fill_up()
        forest.request(tokens, "warming up")
    name = f"request, {tokens:,} tokens"
    for repetition in range(repetitions):
        took = [0.0, 0.0]
        for which in (0, 1) if repetition % 2 else (1, 0):
            figure = pair[which].request(tokens, f"{name}, records {('off', 'on')[which]}")
            took[which] = figure.value
            yield figure
        yield Figure(f"records' part, {name}", took[1] / took[0] - 1, "share", "less")
