"""Lay the package out as it is installed, in links: scripts/link_tree.py [TREE].

kernels/ and tui/ stand beside the package and become ktserve.kernels and ktserve.tui when it is
installed. Tools that read source trees (mypy, import-linter) find them in TREE, build/linked.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"ktserve": "ktserve", "kernels": "ktserve/kernels", "tui": "ktserve/tui"}


def lay_out(tree: Path) -> None:
    """Make ``tree`` hold a link to every file of the package, and nothing else.

    Several may do so at once, and while the tree is read: a tree that is right is left alone, and
    one that is not is replaced as a whole.
    """
    wanted = _wanted()
    if _links(tree) == wanted:
        return
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=f".{tree.name}-") as scratch:
        new = Path(scratch, "new")
        for path, source in wanted.items():
            # Directories are real, because grimp follows no linked ones.
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).symlink_to(source)
        for attempt in itertools.count():
            try:
                new.rename(tree)
                return
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            with suppress(FileNotFoundError):
                tree.rename(Path(scratch, f"old-{attempt}"))


def _wanted() -> dict[Path, Path]:
    """Each file's place in the tree, and where it is."""
    return {
        Path(target, source.relative_to(ROOT / part)): source
        for part, target in PARTS.items()
        for source in sorted((ROOT / part).rglob("*"))
        if source.is_file() and "__pycache__" not in source.parts
    }


def _links(tree: Path) -> dict[Path, Path]:
    """Each link in ``tree``, and where it leads."""
    found: dict[Path, Path] = {}
    # Another one may replace the tree meanwhile; then it is not seen as right.
    with suppress(FileNotFoundError):
        for directory, _, names in os.walk(tree):
            for path in (Path(directory, name) for name in names):
                if path.is_symlink():
                    found[path.relative_to(tree)] = path.readlink()
    return found


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "linked")
