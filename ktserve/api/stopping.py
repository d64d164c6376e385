"""Where a stop string ends a text, whatever the tokens' borders.

Each stop string is followed by its own Knuth-Morris-Pratt automaton, so that a character costs a
constant amount of work for each stop string and the text that has to wait is known exactly: the
longest end of it that begins a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one sequence, fed with its text as it grows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Take in ``text``; give what may be shown now, and whether a stop string was completed.

        The text before the stop string that is completed first is shown and the rest is dropped;
        of two completed by one character, the longer counts. With ``may_stop`` False a stop string
        that ends in ``text`` is text like any other.
        """
        if not self._automata:
            return text, False
        text = self._held + text
        for at in range(len(self._held), len(text)):
            done = [
                automaton.length
                for automaton in self._automata
                if automaton.step(text[at]) and may_stop
            ]
            if done:
                self._held = ""
                return text[: at + 1 - max(done)], True
        waiting = max(automaton.state for automaton in self._automata)
        shown = len(text) - waiting
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """The text that waited for a stop string that never came."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How many characters of one stop string the text ends with."""

    def __init__(self, stop: str) -> None:
        self.length = len(stop)
        self.state = 0
        self._stop = stop
        self._borders = [0] * len(stop)
        border = 0
        for at in range(1, len(stop)):
            while border and stop[at] != stop[border]:
                border = self._borders[border - 1]
            border += stop[at] == stop[border]
            self._borders[at] = border

    def step(self, character: str) -> bool:
        """Follow one character; True when it completes the stop string."""
        while self.state and character != self._stop[self.state]:
            self.state = self._borders[self.state - 1]
        self.state += character == self._stop[self.state]
        if self.state < self.length:
            return False
        self.state = self._borders[self.state - 1]
        return True
