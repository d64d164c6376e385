"""Draw docs/figures/replay.svg: scripts/replay_figure.py FILE..., each of `ktserve bench replay`.

For each trace and size of the pool: on the left the modes under LRU, on the right the policies in
the shared mode. A row has the share that the interactive tenants found when it was quiet (full) and
with the scanner (hollow), means over the seeds with their least and greatest, and the share that a
cache without limit finds. The axis is whole, 0 to 100 %.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PATH = Path(__file__).resolve().parent.parent / "docs" / "figures" / "replay.svg"

ROW = 17
GAP = 30
TOP = 92
BOTTOM = 34
LABEL = 88
AXIS = 330
PANEL = LABEL + AXIS + 84
MARGIN = 16
RADIUS = 4.5

MODES = ("shared", "floors", "partitioned")
POLICIES = ("lru", "slru", "lfu", "fifo")

STYLE = """
text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 14px; font-weight: 600 }
.group { font-weight: 600 }
.small { font-size: 11px; fill: #59636e }
.back { fill: #ffffff }
.grid { stroke: #d1d9e0; stroke-width: 1 }
.best { stroke: #59636e; stroke-width: 1.5; stroke-dasharray: 3 3 }
.loss { stroke: #c2570c; stroke-width: 3; opacity: 0.45 }
.spread { stroke: #1f2328; stroke-width: 1 }
.quiet { fill: #0a63c9; stroke: #0a63c9; stroke-width: 1.5 }
.scanner { fill: #ffffff; stroke: #c2570c; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9ba5b0 }
  .back { fill: #0d1117 }
  .grid { stroke: #343b44 }
  .best { stroke: #9ba5b0 }
  .loss { stroke: #f0883e }
  .spread { stroke: #e6edf3 }
  .quiet { fill: #58a6ff; stroke: #58a6ff }
  .scanner { fill: #0d1117; stroke: #f0883e }
}
"""


@dataclass(frozen=True)
class Row:
    """One way of replaying: hit rates in percent, quiet and with the scanner, one for each seed."""

    label: str
    quiet: Sequence[float]
    scanner: Sequence[float]


@dataclass(frozen=True)
class Group:
    """One trace at one size of the pool."""

    title: str
    best: float
    modes: Sequence[Row]
    policies: Sequence[Row]


def read(files: Sequence[Path]) -> Iterator[Group]:
    """The groups of ``files``, in their order."""
    for file in files:
        for trace in json.loads(file.read_text())["traces"]:
            for pages in dict.fromkeys(each["pages"] for each in trace["replays"]):
                here = [each for each in trace["replays"] if each["pages"] == pages]
                name = trace["name"].removesuffix(".jsonl").replace("_", " ")
                yield Group(
                    f"{name}, {pages:,} pages of {trace['block_tokens']} tokens",
                    100 * trace["best"],
                    list(_rows(here, MODES, "sharing", {"policy": "lru"})),
                    list(_rows(here, POLICIES, "policy", {"sharing": "shared"})),
                )


def _rows(
    replays: Sequence[dict[str, Any]], labels: Sequence[str], by: str, only: dict[str, str]
) -> Iterator[Row]:
    for label in labels:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for each in replays:
            if each[by] == label and only.items() <= each.items():
                rates[each["scanner"]].append(100 * each["hit_rate"])
        if all(rates.values()):
            yield Row(label, rates[False], rates[True])


def svg(groups: Sequence[Group]) -> str:
    """The figure."""
    heights = [ROW * max(len(group.modes), len(group.policies)) + GAP for group in groups]
    width = 2 * PANEL + 2 * MARGIN
    height = TOP + sum(heights) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title">',
        '<title id="title">Share of prompt pages found in the cache, quiet and with a scanning '
        "neighbour, by mode and by policy</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
        *_legend(),
    ]
    panels = (
        (MARGIN, "Modes, each with LRU", [group.modes for group in groups]),
        (MARGIN + PANEL, "Policies, each shared", [group.policies for group in groups]),
    )
    for left, title, rows_of in panels:
        parts.append(_text(left + LABEL, TOP - 24, title, "title"))
        y = TOP
        for group, rows, room in zip(groups, rows_of, heights, strict=True):
            parts += _group(left, y, group, rows)
            y += room
        for percent in range(0, 101, 20):
            x = _x(left, percent)
            parts.append(_text(x, y + 4, f"{percent} %", "small", "middle"))
    parts.append("</svg>\n")
    return "\n".join(parts)


def _legend() -> Iterator[str]:
    y = 24
    yield _text(MARGIN, y, "Share of the interactive tenants' prompt pages that was found:", "")
    x = MARGIN + 424
    yield f'<circle class="quiet" cx="{x}" cy="{y - 4}" r="{RADIUS}"/>'
    yield _text(x + 10, y, "quiet", "")
    x += 66
    yield f'<circle class="scanner" cx="{x}" cy="{y - 4}" r="{RADIUS}"/>'
    yield _text(x + 10, y, "with the scanner", "")
    x += 130
    yield f'<line class="spread" x1="{x - 8}" x2="{x + 8}" y1="{y - 4}" y2="{y - 4}"/>'
    yield _text(x + 14, y, "least to greatest of the seeds", "")
    x += 224
    yield f'<line class="best" x1="{x}" x2="{x}" y1="{y - 12}" y2="{y + 4}"/>'
    yield _text(x + 8, y, "cache without limit", "")


def _group(left: int, y: int, group: Group, rows: Sequence[Row]) -> Iterator[str]:
    yield _text(left + LABEL, y + 6, group.title, "group")
    first, last = y + 13, y + 13 + ROW * len(rows)
    for percent in range(0, 101, 20):
        x = _x(left, percent)
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{first}" y2="{last}"/>'
    best = _x(left, group.best)
    yield f'<line class="best" x1="{best}" x2="{best}" y1="{first}" y2="{last}"/>'
    for number, row in enumerate(rows):
        middle = first + ROW * number + ROW / 2
        quiet, scanner = statistics.fmean(row.quiet), statistics.fmean(row.scanner)
        yield _text(left + LABEL - 8, middle + 4, row.label, "", "end")
        yield _line("loss", _x(left, scanner), _x(left, quiet), middle)
        for rates in (row.scanner, row.quiet):
            yield _line("spread", _x(left, min(rates)), _x(left, max(rates)), middle)
        for kind, mean in (("scanner", scanner), ("quiet", quiet)):
            yield f'<circle class="{kind}" cx="{_x(left, mean)}" cy="{middle}" r="{RADIUS}"/>'
        figures = f"{quiet:.1f} / {scanner:.1f}"
        yield _text(left + LABEL + AXIS + 8, middle + 4, figures, "small")


def _x(left: int, percent: float) -> float:
    return round(left + LABEL + AXIS * percent / 100, 1)


def _line(kind: str, start: float, end: float, y: float) -> str:
    return f'<line class="{kind}" x1="{start}" x2="{end}" y1="{y}" y2="{y}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: scripts/replay_figure.py FILE..., as `ktserve bench replay --json` writes")
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(svg(list(read([Path(name) for name in sys.argv[1:]]))))
