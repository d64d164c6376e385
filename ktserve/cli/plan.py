"""What `ktserve run --dry-run` shows: settings, their origins, and what memory would hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from ktserve.config import declared
from ktserve.logs import clean

if TYPE_CHECKING:
    from ktserve.config import Setting, Settings
    from ktserve.models.memory import MemoryPlan
    from ktserve.resolution import Resolved
    from ktserve.tenancy.shares import Share


def show_settings(resolved: Resolved, effective: Settings, out: TextIO) -> None:
    """Print each setting's name, value in effect and origin; secrets are not shown.

    Args:
        effective: the settings that a server would run with. A value that is not in ``resolved``
            is marked "(auto)".
    """
    rows = [
        (name, clean(_value(setting, resolved.settings, effective)), resolved.origins[name])
        for name, setting in declared().items()
    ]
    _table("Settings", ("setting", "value", "from"), rows, out)


def _value(setting: Setting, given: Settings, effective: Settings) -> str:
    value = getattr(effective, setting.name)
    chosen = "" if value == getattr(given, setting.name) else " (auto)"
    return setting.shown(value) + chosen


def show_plan(plan: MemoryPlan, out: TextIO) -> None:
    """Print what the weights take and how many tokens the pages would hold."""
    rows = [
        ("device", clean(plan.device)),
        ("precision", plan.dtype),
        ("weights", _bytes(plan.weight_bytes)),
        ("available", _bytes(plan.available_bytes)),
        ("page pool", _bytes(plan.pool_bytes)),
        ("bytes per token", f"{plan.kv_bytes_per_token:,}"),
        ("tokens per page", f"{plan.page_size:,}"),
        ("pages", f"{plan.pages:,}"),
        ("tokens that fit", f"{plan.tokens:,}"),
        ("context length", f"{plan.context_length:,} tokens"),
    ]
    _table("Memory plan", ("", ""), rows, out)
    for note in plan.notes:
        print(f"note: {clean(note)}", file=out)


def show_shares(shares: Mapping[str, Share], out: TextIO) -> None:
    """Print each tenant's part of the page pool, in tokens."""
    rows = [
        (clean(name), f"{share.floor:,}", f"{share.cap:,}", f"{share.capacity:,}")
        for name, share in shares.items()
    ]
    header = ("tenant", "keeps", "holds at most", "for one request at most")
    _table("Tenants, in tokens of the page pool", header, rows, out)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO) -> None:
    """A rich table on a terminal; elsewhere the rows alone, separated by tabs, for programs."""
    if not out.isatty():
        for row in rows:
            print("\t".join(row), file=out)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=any(header), box=None)
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        # As Text, so that brackets in a value are not taken for markup.
        table.add_row(*(Text(cell) for cell in row))
    Console(file=out).print(table)


def _bytes(count: int) -> str:
    """In GiB alone, so that figures of a plan can be compared at a glance."""
    size = count / 2**30
    return f"{size:,.1f} GiB" if size >= 0.05 or not count else "less than 0.1 GiB"
