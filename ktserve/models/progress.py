"""Telling a person how far a long step has come."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (done, total) in any unit, ``done`` never falling."""


def silent(_done: int, _total: int) -> None:
    """A `Progress` that tells nobody."""


@contextmanager
def shown(label: str) -> Iterator[Progress]:
    """A `Progress` that draws a bar on stderr where that is a terminal, and logs each tenth else.

    Args:
        label: what is being done, without hostile text in it.
    """
    if not sys.stderr.isatty():
        yield _logged(label)
        return
    # Rich is slow to import and not needed in a service.
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _logged(label: str) -> Progress:
    next_percent = 0

    def report(done: int, total: int) -> None:
        nonlocal next_percent
        percent = 100 * done // max(total, 1)
        if percent >= next_percent:
            logger.info("%s: %d %%", label, percent)
            next_percent = percent - percent % 10 + 10

    return report
