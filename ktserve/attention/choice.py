"""Which attention backend runs."""

from __future__ import annotations

from typing import Literal

from ktserve.attention.backend import AttentionBackend
from ktserve.attention.torch_backend import TorchBackend


def create_backend(name: Literal["auto", "torch"]) -> AttentionBackend:
    """The backend called ``name``; "auto" is the best one that there is: in this version, torch."""
    if name not in ("auto", "torch"):
        raise ValueError(f"attention_backend is {name!r}; this version has: auto, torch")
    return TorchBackend()
