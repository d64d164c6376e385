"""The free list."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.int64]


class DoubleFree(RuntimeError):
    """A page was given back twice. Two sequences could come to share it, so nothing goes on."""


class PagePool:
    """Hands out page ids and takes them back; knows nothing of who holds them.

    Attributes:
        total: pages of the pool; ids are 0 to ``total - 1``.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a page pool needs at least one page, not {total}")
        self.total = total
        self._stack: PageIds = np.arange(total - 1, -1, -1, dtype=np.int64)
        self._free = total
        self._out = np.zeros(total, dtype=np.bool_)
        self._place = np.zeros(total, dtype=np.int32)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free

    def take(self, count: int) -> PageIds:
        """``count`` free pages, which now belong to the caller; ascending where they can be.

        Raises:
            ValueError: fewer are free; callers check `free` first.
        """
        if not 0 <= count <= self._free:
            raise ValueError(f"{count} pages asked for, {self._free} are free")
        self._free -= count
        pages = self._stack[self._free : self._free + count][::-1].copy()
        self._out[pages] = True
        return pages

    def give_back(self, pages: PageIds) -> None:
        """Return pages that the caller holds; it must not use them afterwards.

        Raises:
            DoubleFree: one of them is free already, or stands twice in ``pages``.
        """
        count = len(pages)
        if not count:
            return
        # A page that stands twice is found at the later of its places alone.
        places = np.arange(count, dtype=np.int32)
        self._place[pages] = places
        known = self._out[pages] & (self._place[pages] == places)
        if np.count_nonzero(known) < count:
            raise DoubleFree("a page came back that was not out")
        self._out[pages] = False
        self._stack[self._free : self._free + count] = pages
        self._free += count

    def keep(self, pages: PageIds) -> None:
        """Make ``pages`` the ones that somebody holds, and all others free."""
        self._out[:] = False
        self._out[pages] = True
        free = np.flatnonzero(~self._out)[::-1]
        self._free = len(free)
        self._stack[: self._free] = free

    def free_ids(self) -> PageIds:
        """The free pages, for audits."""
        return self._stack[: self._free].copy()
