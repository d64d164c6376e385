"""What every test runs under."""

from __future__ import annotations

import os

import pytest

from ktserve.config import ENVIRONMENT_PREFIX

# As the engine does, and before anything here imports torch: a test must not crawl because another
# program has one of the processors.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the developer's own shell must not reach a test."""
    for variable in list(os.environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and not variable.startswith("KTSERVE_TEST_"):
            monkeypatch.delenv(variable)
