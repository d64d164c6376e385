"""`ktserve tenants`: make, list and check the tenants of a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ktserve.cli.exit_codes import ExitCode
from ktserve.cli.help import Command

if TYPE_CHECKING:
    from ktserve.tenancy.tenants_file import Entry, TenantsFileError

app = typer.Typer(
    help="Make, list and check tenants and their API keys.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant's name.")]
File = Annotated[
    Path,
    typer.Option("--file", metavar="FILE", help="The file of tenants.", envvar="KTSERVE_TENANTS"),
]
DEFAULT_FILE = Path("tenants.toml")


@app.command(cls=Command)
def new(
    name: Name,
    file: File = DEFAULT_FILE,
    label: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What people call the tenant.")
    ] = None,
) -> None:
    """Add a tenant to the file and print its first key, once."""
    from ktserve.tenancy.tenants_edit import add_tenant, new_api_key
    from ktserve.tenancy.tenants_file import TenantsFileError

    key = new_api_key()
    try:
        add_tenant(file, name, label, key)
    except TenantsFileError as error:
        _fail("new", error)
    _hand_over(key, f"tenant {name} added to {file}")


@app.command(cls=Command)
def add_key(name: Name, file: File = DEFAULT_FILE) -> None:
    """Add a key to a tenant and print it, once. Its other keys stay valid."""
    from ktserve.tenancy.tenants_edit import add_key as add
    from ktserve.tenancy.tenants_edit import new_api_key
    from ktserve.tenancy.tenants_file import TenantsFileError

    key = new_api_key()
    try:
        add(file, name, key)
    except TenantsFileError as error:
        _fail("add-key", error)
    _hand_over(key, f"key added to tenant {name} in {file}")


@app.command("list", cls=Command)
def list_tenants(
    file: File = DEFAULT_FILE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the tenants, how many keys each has, and their limits."""
    from ktserve.tenancy.tenants_file import TenantsFileError, read_tenants_file

    try:
        entries = read_tenants_file(file, need_key=False).entries
    except TenantsFileError as error:
        _fail("list", error)
    typer.echo(_as_json(entries) if as_json else _as_table(entries))


@app.command(cls=Command)
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file of tenants.")],
) -> None:
    """Check a file of tenants; every problem is printed."""
    from ktserve.tenancy.tenants_file import (
        TenantsFileError,
        TenantsFileUnreadable,
        read_tenants_file,
    )

    try:
        entries = read_tenants_file(file, need_key=True).entries
    except TenantsFileUnreadable as error:
        _fail("check", error)
    except TenantsFileError as error:
        _fail("check", error, ExitCode.CHECK_FAILED)
    keys = sum(len(digests) for _, digests in entries)
    typer.echo(f"{_clean(str(file))}: good ({len(entries)} tenants, {keys} keys)")


def _hand_over(key: str, done: str) -> None:
    typer.echo(
        f"{_clean(done)}. The key is shown this once; a running server knows it after a restart.",
        err=True,
    )
    typer.echo(key)


def _fail(command: str, error: TenantsFileError, code: ExitCode = ExitCode.USAGE) -> NoReturn:
    for problem in error.problems:
        typer.echo(f"ktserve tenants {command}: {_clean(problem)}", err=True)
    sys.exit(code)


def _clean(text: str) -> str:
    from ktserve.logs import clean

    return clean(text)


def _as_json(entries: list[Entry]) -> str:
    # ASCII alone, so that a label cannot drive the terminal, and exact for programs.
    return json.dumps(
        [
            {
                "name": tenant.name,
                "label": tenant.label,
                "weight": tenant.quota.weight,
                "cache_floor": tenant.quota.cache_floor,
                "cache_cap": tenant.quota.cache_cap,
                "cache_ttl": tenant.quota.cache_ttl,
                "keys": len(digests),
                "limits": {
                    "max_concurrent_requests": tenant.limits.max_concurrent_requests,
                    "max_context": tenant.limits.max_context,
                },
            }
            for tenant, digests in entries
        ],
        indent=2,
    )


def _as_table(entries: list[Entry]) -> str:
    rows: list[tuple[str, ...]] = [
        ("NAME", "KEYS", "WEIGHT", "FLOOR", "CAP", "TTL", "MAX REQUESTS", "MAX CONTEXT", "LABEL")
    ]
    for tenant, digests in entries:
        quota = tenant.quota
        numbers = (
            quota.cache_floor,
            quota.cache_cap,
            quota.cache_ttl,
            tenant.limits.max_concurrent_requests,
            tenant.limits.max_context,
        )
        rows.append(
            (
                tenant.name,
                str(len(digests)),
                f"{quota.weight:g}",
                *("-" if number is None else f"{number:.10g}" for number in numbers),
                _clean(tenant.label or "-"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
