"""Write what is generated from the command tree: completions/ and docs/man/."""

from __future__ import annotations

from pathlib import Path

from ktserve.cli.command_tree import tree
from ktserve.cli.man import pages
from ktserve.cli.shells import FILES, WRITERS

ROOT = Path(__file__).resolve().parent.parent


def generated() -> dict[Path, str]:
    """Every file and its text."""
    root = tree()
    found = {ROOT / "completions" / FILES[shell]: write(root) for shell, write in WRITERS.items()}
    return found | {ROOT / "docs" / "man" / name: text for name, text in pages(root).items()}


if __name__ == "__main__":
    texts = generated()
    for old in (ROOT / "docs" / "man").glob("*.1"):
        if old not in texts:
            old.unlink()
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
