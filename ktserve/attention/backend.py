"""What an attention backend promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ktserve.attention.batch import PagedBatch


class AttentionPlan(Protocol):
    """What a backend computes once a step and uses in every layer."""


class AttentionBackend(Protocol):
    """Writes a step's keys and values into their pages and attends over pages.

    A sequence's result depends on its own queries, keys and values alone: what else is in the row,
    and where its pages lie, must not show.
    """

    name: str

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        """Prepare one step; called before any layer runs."""
        ...

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: PagedBatch,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Causal attention of one layer.

        Args:
            layer: index of the layer's storage.
            query: ``[tokens, heads, head_dim]``.
            key: ``[tokens, kv_heads, head_dim]``, rotated already.
            value: likewise.
            batch: the step's layout.
            scaling: factor on the scores.
            sliding_window: a token sees this many tokens, itself included; None is all.
            softcap: scores become ``softcap * tanh(score / softcap)``; None is off.

        Returns:
            ``[tokens, heads, head_dim]``.
        """
        ...
