"""The texts say what the code does, where that can be compared."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from ktserve.api.routes import router

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
API = (ROOT / "docs" / "api.md").read_text()

_ERROR_CODE = re.compile(r'code="(\w+)"|EngineError\(\s*\d+,\s*"(\w+)"|, "(\w+_exceeded)"')


def anchors(page: Path) -> set[str]:
    """The fragments that lead to the headings of ``page``."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_the_tables_of_fields_are_those_of_the_declarations() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "api_fields.py"))
    assert page["document"](API) == API, "run scripts/api_fields.py"


def test_every_route_is_described_and_no_other() -> None:
    described = set(re.findall(r"^\| `[A-Z]+ (/v1/[^`]*)` \|", API, re.MULTILINE))
    catch_all = "/v1/{path:path}"
    served = {getattr(route, "path", "").replace(":path", "") for route in router.routes}
    assert described == served - {catch_all.replace(":path", "")}


def test_every_error_code_is_described() -> None:
    sources = [*(ROOT / "ktserve" / "api").glob("*.py"), ROOT / "ktserve/engine/scheduler.py"]
    found = {
        code
        for source in sources
        for match in _ERROR_CODE.findall(source.read_text())
        for code in match
        if code
    }
    assert "queue_full" in found
    assert not {code for code in found if f"`{code}`" not in API}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not fragment or fragment in anchors(linked), f"{page.name} links to {target}"
