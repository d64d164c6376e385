"""Lay the package out as it is installed, in links: build/linked/ktserve.

kernels/ and tui/ stand beside the package and become ktserve.kernels and ktserve.tui when it is
installed. Tools that read source trees (mypy, import-linter) find them in this one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"ktserve": "ktserve", "kernels": "ktserve/kernels", "tui": "ktserve/tui"}


def main() -> None:
    """Make the tree anew; directories are real, because grimp follows no linked ones."""
    tree = ROOT / "build" / "linked"
    shutil.rmtree(tree, ignore_errors=True)
    for source, target in PARTS.items():
        shutil.copytree(
            ROOT / source,
            tree / target,
            copy_function=os.symlink,
            ignore=shutil.ignore_patterns("__pycache__"),
        )


if __name__ == "__main__":
    main()
