"""Clocks for caches under test, in nanoseconds."""

from __future__ import annotations

SECOND = 1_000_000_000


class HandClock:
    """Seconds, turned by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> int:
        return int(self.seconds * SECOND)


class TickingClock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> int:
        self.seconds += 1
        return self.seconds * SECOND
