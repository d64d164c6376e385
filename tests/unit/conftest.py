from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """As ``tmp_path``, with a path that is short enough for Unix sockets on every system."""
    with tempfile.TemporaryDirectory(prefix="kt-") as path:
        yield Path(path).resolve()
