"""Our paged attention as an attention implementation of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ktserve.attention.batch import PagedBatch

ATTENTION_NAME = "ktserve_paged"


def register() -> None:
    """Make ``attn_implementation="ktserve_paged"`` known to transformers.

    Models then take a `PagedBatch` as the keyword ``paged`` of their forward call, which
    transformers hands through to every attention layer.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _forward)
    # Causality and sequence borders come from the PagedBatch; there is no mask to build.
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, in transformers' shapes: ``[1, heads, tokens, head_dim]`` in,
    ``[1, tokens, heads, head_dim]`` out."""
    if attention_mask is not None:
        raise ValueError("paged attention takes no attention mask; pass position_ids and paged")
    if s_aux is not None:
        raise ValueError("paged attention has no attention sinks, which this model needs")
    layer = module.layer_idx
    assert isinstance(layer, int)
    output = paged.backend.forward(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        paged,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return output.unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None
