"""The machine that a measurement ran on, for its record."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import ktserve


def describe() -> dict[str, Any]:
    """Processor, cores, memory, load and system. The load is that of now: call it at the start."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": _memory_bytes(),
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of the load generator and what it runs on."""
    return {
        "ktserve": ktserve.__version__,
        "python": platform.python_version(),
        "httpx": metadata.version("httpx"),
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
