"""What replays came to, as a table and as a JSON document; it can be shown at any moment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ktserve.bench.replay import Replayed
from ktserve.bench.traces import Trace
from ktserve.logs import clean

_BOTH = (False, True)
"""Without the scanner, and with it."""

_HEADING = (
    "",
    "pages",
    "sharing",
    "policy",
    "found, quiet",
    "found, scanner",
    "lost to others",
    "cut",
)

_COLUMNS = 6
"""Of the table of tenants, so that it stays below 100 characters."""


@dataclass
class TraceReport:
    """The replays of one trace.

    Attributes:
        best: the hit rate of a cache without limit, 0..1.
    """

    trace: Trace
    best: float
    replays: list[Replayed] = field(default_factory=list)

    def table(self) -> str:
        """For people: a row for each way of replaying, then the tenants of the first seed."""
        ways = self._ways()
        lines = [
            f"{clean(self.trace.name)}: {len(self.trace.requests):,} requests, "
            f"{self._roots():,} roots, a page is a block of {self.trace.block_tokens} tokens",
            f"found by a cache without limit: {self.best:.1%}",
            "",
            *_aligned([_HEADING, *(_row(number, way) for number, way in enumerate(ways, 1))]),
            "found: % of the pages asked for; lost to others, cut: quiet / with the scanner",
            "",
            "found by tenant, quiet / with the scanner, first seed, by the rows above:",
            *_by_tenant(ways),
        ]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """For programs. Rates are 0..1, everything else is in requests or pages."""
        return {
            "name": self.trace.name,
            "block_tokens": self.trace.block_tokens,
            "requests": len(self.trace.requests),
            "roots": self._roots(),
            "best": self.best,
            "replays": [
                {**asdict(replayed), "hit_rate": replayed.hit_rate} for replayed in self.replays
            ],
        }

    def _roots(self) -> int:
        return len({request.root for request in self.trace.requests})

    def _ways(self) -> list[list[Replayed]]:
        """The replays that differ in scanner and seed alone, together."""
        ways: dict[tuple[int, str, str], list[Replayed]] = {}
        for replayed in self.replays:
            way = (replayed.pages, replayed.sharing, replayed.policy)
            ways.setdefault(way, []).append(replayed)
        return list(ways.values())


def _row(number: int, way: Sequence[Replayed]) -> Sequence[str]:
    first = way[0]
    found = [_spread([r.hit_rate for r in way if r.scanner is scanner]) for scanner in _BOTH]
    lost = _pair(way, lambda replayed: replayed.lost_to_others)
    cut = _pair(way, lambda replayed: replayed.cut_requests)
    return str(number), f"{first.pages:,}", first.sharing, first.policy, *found, lost, cut


def _spread(rates: Sequence[float]) -> str:
    if not rates:
        return "-"
    mean, low, high = (100 * rate for rate in (statistics.fmean(rates), min(rates), max(rates)))
    return f"{mean:.1f} ({low:.1f}..{high:.1f})"


def _pair(way: Sequence[Replayed], count: Callable[[Replayed], int]) -> str:
    """Means over the seeds, quiet / with the scanner."""
    counts = [[count(r) for r in way if r.scanner is scanner] for scanner in _BOTH]
    return " / ".join(f"{statistics.fmean(each):,.0f}" if each else "-" for each in counts)


def _by_tenant(ways: Sequence[Sequence[Replayed]]) -> Iterator[str]:
    tenants = sorted({tenant for way in ways for replayed in way for tenant in replayed.tenants})
    numbered = list(enumerate(ways, 1))
    for start in range(0, len(numbered), _COLUMNS):
        part = numbered[start : start + _COLUMNS]
        rows = [["", *(str(number) for number, _ in part)]]
        rows += [[tenant, *(_of_tenant(way, tenant) for _, way in part)] for tenant in tenants]
        yield from _aligned(rows)


def _of_tenant(way: Sequence[Replayed], tenant: str) -> str:
    seed = min(replayed.seed for replayed in way)
    cells = []
    for scanner in _BOTH:
        tallies = [r.tenants.get(tenant) for r in way if (r.seed, r.scanner) == (seed, scanner)]
        found = [f"{100 * tally.hit_rate:.1f}" for tally in tallies if tally is not None]
        cells.append(found[0] if found else "-")
    return " / ".join(cells)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
