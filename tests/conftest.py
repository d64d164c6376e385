"""What every test runs under."""

from __future__ import annotations

import os

import pytest

from ktserve.config import ENVIRONMENT_PREFIX

# Before anything here imports torch, and for the servers that tests start: threads that spin while
# they wait for each other make a test crawl when another program has one of the processors.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the developer's own shell must not reach a test."""
    for variable in list(os.environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and not variable.startswith("KTSERVE_TEST_"):
            monkeypatch.delenv(variable)
