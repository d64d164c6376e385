"""What the operator is told once the server is ready, and warned of when it starts."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from ktserve.config import Settings
from ktserve.logs import clean
from ktserve.messages import EngineInfo

_SHARING = {
    "shared": "one order over all tenants",
    "floors": "a floor for each tenant",
    "partitioned": "fixed parts",
}

# A socket for :: takes IPv6 alone.
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def banner_rows(
    info: EngineInfo, settings: Settings, url: str, tenants: int, runtime_dir: Path
) -> list[tuple[str, str]]:
    """The banner's lines as (label, text), safe to print.

    Args:
        url: where the API listens.
        tenants: how many there are.
    """
    pages = info.pool_tokens // info.page_size
    if settings.tenants is not None:
        who = f"{tenants}, by API key"
    elif settings.api_key is not None:
        who = "one tenant, one key"
    else:
        who = "one tenant, no key"
    rows = [
        ("model", f"{info.model} ({info.architecture})"),
        ("device", f"{info.device}, attention: {info.attention_backend}"),
        ("precision", info.dtype),
        ("pool", f"{info.pool_tokens:,} tokens in {pages:,} pages of {info.page_size:,}"),
        ("context", f"{info.context_length:,} tokens"),
        ("cache", _cache(settings)),
        ("tenants", who),
        *_address_rows(url),
        ("sockets", str(runtime_dir)),
    ]
    return [(label, clean(text)) for label, text in rows]


def _cache(settings: Settings) -> str:
    if settings.disable_radix_cache:
        return "off, every prompt is computed in full"
    mode, policy = settings.cache_sharing, settings.radix_eviction_policy
    return f"{mode} ({_SHARING[mode]}), eviction: {policy}"


def _address_rows(url: str) -> list[tuple[str, str]]:
    """Where clients of this machine reach the server, also where it listens on all addresses."""
    parts = urlsplit(url)
    loopback = _LOOPBACKS.get(parts.hostname or "")
    if loopback is None:
        return [("URL", f"{url}/v1")]
    return [
        ("URL", f"{parts.scheme}://{loopback}:{parts.port}/v1"),
        ("listening", f"on all addresses of this machine ({parts.hostname})"),
    ]


def print_banner(rows: Sequence[tuple[str, str]], out: TextIO) -> None:
    """Print ``rows``: in a frame on a terminal, else as ``label: text`` lines for programs."""
    if not out.isatty():
        print("ktserve is ready", file=out)
        for label, text in rows:
            print(f"{label}: {text}", file=out)
        out.flush()
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in rows:
        # As Text, so that brackets in a value are not taken for markup.
        table.add_row(label, Text(text))
    Console(file=out).print(
        Panel(table, title="ktserve is ready", title_align="left", expand=False)
    )


def exposure_warning(settings: Settings) -> str | None:
    """What to warn of when others can reach a server that asks for no key, else None."""
    if settings.tenants is not None or settings.api_key is not None:
        return None
    if _is_loopback(settings.host):
        return None
    return (
        f"--host {settings.host} can be reached from other machines and no key is asked for: "
        "anyone who reaches it can use the model, and all of them share one cache. "
        "Set --tenants or --api-key, or listen on --host 127.0.0.1"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
