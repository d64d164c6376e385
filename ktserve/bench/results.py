"""The figures of a measurement, as they come in; a table and a JSON document of them."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktserve.bench.workloads import Figure
from ktserve.logs import clean

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Failed:
    """One request, or one figure, that did not come about."""

    target: str
    workload: str
    run: int
    reason: str


@dataclass
class Results:
    """What has been measured so far; it can be shown at any moment.

    Attributes:
        targets: the labels of the servers, in order.
        stopped: why the measurement ended early, or None.
        found: what was learned of the servers and the prompts.
    """

    targets: tuple[str, ...]
    stopped: str | None = None
    found: dict[str, Any] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)
    _figures: dict[str, dict[str, list[Figure]]] = field(default_factory=dict)

    def add(self, target: str, figures: list[Figure]) -> None:
        """Take the figures of one run."""
        for figure in figures:
            self._figures.setdefault(figure.name, {}).setdefault(target, []).append(figure)

    def add_failure(self, target: str, workload: str, run: int, reason: str) -> None:
        """Take note of a request, or a figure, that did not come about."""
        self.failures.append(Failed(target, workload, run, reason))

    def table(self) -> str:
        """The figures for people: median (min..max) over the runs, and with two servers a ratio."""
        compare = len(self.targets) == 2
        heading = ["measured", "unit", *self.targets]
        rows = [[*heading, f"{self.targets[0]} is better by"] if compare else heading]
        for name, of_target in self._figures.items():
            unit = next(iter(of_target.values()))[0].unit
            row = [name, "%" if unit == "share" else unit]
            row += [_cell(of_target.get(target, [])) for target in self.targets]
            rows.append(
                [*row, _ratio(*(of_target.get(t, []) for t in self.targets))] if compare else row
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self._remarks()])

    def document(self) -> dict[str, Any]:
        """The figures for programs."""
        return {
            "stopped": self.stopped,
            "found": self.found,
            "failures": [vars(failure) for failure in self.failures],
            "figures": [
                {
                    "name": name,
                    "unit": figures[0].unit,
                    "better": figures[0].better,
                    "target": target,
                    "runs": [figure.value for figure in figures],
                    **_spread(figures),
                }
                for name, of_target in self._figures.items()
                for target, figures in of_target.items()
            ],
        }

    def _remarks(self) -> list[str]:
        lines = [] if self.stopped is None else ["", f"Stopped early: {self.stopped}."]
        if self.failures:
            kinds = Counter((f.target, f.workload, clean(f.reason)) for f in self.failures)
            lines += ["", f"{len(self.failures)} failed; figures that needed them are left out:"]
            lines += [
                f"  {count} x {target}, {workload}: {reason}"
                for (target, workload, reason), count in kinds.most_common()
            ]
        return lines


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write ``document`` to ``path``, whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with open(descriptor, "w") as file:
        # 0600 is for secrets; a report is for others, too.
        os.fchmod(file.fileno(), 0o644)
        json.dump({"format": FORMAT_VERSION, **document}, file, indent=2)
        file.write("\n")
    os.replace(temporary, path)


def _spread(figures: list[Figure]) -> dict[str, float]:
    values = [figure.value for figure in figures]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _cell(figures: list[Figure]) -> str:
    if not figures:
        return "-"
    scale = 100 if figures[0].unit == "share" else 1
    digits = 3 if figures[0].unit == "s" else 1
    median, low, high = (value * scale for value in _spread(figures).values())
    return f"{median:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def _ratio(ours: list[Figure], theirs: list[Figure]) -> str:
    """How much better the first median is: above 1 is better, whichever way the figure counts."""
    if not ours or not theirs or ours[0].better == "neither":
        return "-"
    first, second = _spread(ours)["median"], _spread(theirs)["median"]
    above, below = (second, first) if ours[0].better == "less" else (first, second)
    return f"{above / below:.2f}x" if below > 0 else "-"
