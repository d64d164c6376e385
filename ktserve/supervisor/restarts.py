"""When a child that died is started again, and when that is given up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RestartRules:
    """Exponential back-off; times in seconds.

    Attributes:
        first_delay: before the first restart; each further one waits twice as long.
        longest_delay: the back-off's bound.
        healthy_after: a child that was ready for this long starts the back-off anew.
        unready_deaths: this many deaths in a row without ever becoming ready end the server.
    """

    first_delay: float = 0.5
    longest_delay: float = 30.0
    healthy_after: float = 60.0
    unready_deaths: int = 5


class RestartPolicy:
    """The history of one child's deaths under ``rules``."""

    def __init__(self, rules: RestartRules) -> None:
        self._rules = rules
        self._delay = rules.first_delay
        self._unready_deaths = 0

    def after_death(self, ready_seconds: float | None) -> float | None:
        """Seconds to wait before the next start, or None to give up.

        Args:
            ready_seconds: how long the child had been ready; None if it never was.
        """
        rules = self._rules
        if ready_seconds is None:
            self._unready_deaths += 1
            if self._unready_deaths >= rules.unready_deaths:
                return None
        else:
            self._unready_deaths = 0
            if ready_seconds >= rules.healthy_after:
                self._delay = rules.first_delay
        delay = self._delay
        self._delay = min(2 * delay, rules.longest_delay)
        return delay
