"""Random weights for a config: a model to test and measure with, without a checkpoint."""

from __future__ import annotations

from typing import Any, cast

import torch
import transformers
from transformers import PretrainedConfig


def build(
    kind: type[transformers.PreTrainedModel],
    config: PretrainedConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
) -> transformers.PreTrainedModel:
    """A model with the weights that its family is initialized with, drawn on ``device``.

    Two calls with the same arguments give the same weights; the global generators are left as
    they were.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model = cast("Any", kind)._from_config(config, dtype=dtype, attn_implementation=attention)
    return cast("transformers.PreTrainedModel", model)
