"""The tree of links that mypy and import-linter read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def started(tree: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "link_tree.py"), str(tree)],
        stderr=subprocess.PIPE,
        text=True,
    )


def laid_out(tree: Path) -> None:
    process = started(tree)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


def sources() -> dict[str, Path]:
    places = {"ktserve": "ktserve", "kernels": "ktserve/kernels", "tui": "ktserve/tui"}
    return {
        f"{place}/{path.relative_to(ROOT / part)}": path
        for part, place in places.items()
        for path in (ROOT / part).rglob("*.py")
    }


def links(tree: Path) -> dict[str, Path]:
    return {
        str(path.relative_to(tree)): path.resolve()
        for path in tree.rglob("*")
        if path.suffix == ".py"
    }


def test_the_tree_is_that_of_the_installed_package(tmp_path: Path) -> None:
    tree = tmp_path / "somewhere" / "linked"
    laid_out(tree)
    assert links(tree) == sources()
    assert not any(path.is_symlink() for path in tree.rglob("*") if path.is_dir())


def test_what_is_gone_from_the_sources_goes_and_a_tree_that_is_right_is_left_alone(
    tmp_path: Path,
) -> None:
    tree = tmp_path / "linked"
    laid_out(tree)
    (tree / "ktserve" / "gone.py").symlink_to(ROOT / "ktserve" / "gone.py")
    laid_out(tree)
    assert links(tree) == sources()
    before = tree.stat().st_ino
    laid_out(tree)
    assert tree.stat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == ["linked"]


def test_several_at_once_all_succeed(tmp_path: Path) -> None:
    tree = tmp_path / "linked"
    # Each finds a tree to be replaced.
    (tree / "ktserve").mkdir(parents=True)
    (tree / "ktserve" / "gone.py").symlink_to(ROOT / "ktserve" / "gone.py")
    processes = [started(tree) for _ in range(6)]
    assert [process.communicate(timeout=60)[1] for process in processes] == [""] * 6
    assert links(tree) == sources()
    assert [path.name for path in tmp_path.iterdir()] == ["linked"]
