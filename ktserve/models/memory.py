"""How much memory the weights and the page pool take, known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from transformers import AutoConfig, PretrainedConfig

from ktserve.config import Settings
from ktserve.models import architectures, cpu_linear, gguf
from ktserve.models.cpu_linear import Packing, precision, weight_bytes_of
from ktserve.models.fusing import fuse
from ktserve.models.loading import (
    choose_context_length,
    choose_device,
    choose_dtype,
    read_config,
)
from ktserve.models.source import ModelSource, check_weights, locate, resolve

CUDA_FRACTION = 0.85
CPU_FRACTION = 0.25
LEAST_TOKENS = 128
"""A pool that cannot hold this much of one sequence is refused, not started."""

_CGROUP = Path("/sys/fs/cgroup")


class InsufficientMemory(ValueError):
    """The page pool would be too small, or larger than memory; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What goes where.

    Attributes:
        weight_bytes: of the weights as they are held, shared ones counted once.
        kv_bytes_per_token: keys and values of one token in all layers.
        available_bytes: what the device has free, with the weights not loaded.
        pool_bytes: of all pages.
        pages: in the pool.
        page_size: tokens in a page.
        tokens: that the pool holds, ``pages * page_size``.
        context_length: the most tokens of one sequence.
        dtype: the precision in words, of the weights too where theirs is another.
        notes: what a person should know about the figures.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    available_bytes: int
    pool_bytes: int
    pages: int
    page_size: int
    tokens: int
    context_length: int
    device: str
    dtype: str
    notes: tuple[str, ...]


def plan(settings: Settings) -> MemoryPlan:
    """The memory plan of ``settings``. Nothing is converted, and no weight is read or fetched; of a
    hub model the config is.

    Raises:
        ValueError: the model, or a setting about it, cannot be used: `ModelNotFound`,
            `UnsupportedGguf`, `UnsupportedModel`, `InvalidModel`, `InvalidCpuWeights` or
            `InsufficientMemory`.
        OSError: a file cannot be read.
    """
    config = _config_of(locate(settings.model, settings.load_format, settings.cache_dir), settings)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, config, device)
    packing = cpu_linear.choose(settings.cpu_weights, dtype, device)
    found = plan_pool(
        config,
        settings,
        device=device,
        dtype=dtype,
        packing=packing,
        weight_bytes=count_weight_bytes(config, dtype, packing),
        available_bytes=available_bytes(device),
    )
    warning = architectures.check(config)
    return found if warning is None else replace(found, notes=(*found.notes, warning))


def plan_pool(
    config: PretrainedConfig,
    settings: Settings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    packing: Packing | None = None,
    weight_bytes: int,
    available_bytes: int,
) -> MemoryPlan:
    """The plan for a known model.

    Args:
        packing: of the linear layers' weights, to be named beside ``dtype``.
        available_bytes: what the device would have free without this model's weights. With the
            weights loaded already, add ``weight_bytes`` to what is free.

    Raises:
        InvalidModel: the context length is more than the model's.
        InsufficientMemory: too few tokens fit, or more than fit were asked for.
    """
    context_length = choose_context_length(settings.context_length, config)
    per_token = kv_bytes_per_token(config, dtype)
    fraction = settings.mem_fraction_static or (
        CUDA_FRACTION if device.type == "cuda" else CPU_FRACTION
    )
    left = available_bytes - weight_bytes
    if device.type == "cuda":
        # What the fraction leaves of the whole device is for activations and others on it.
        share = int(left - (1 - fraction) * torch.cuda.mem_get_info(device)[1])
    else:
        share = int(fraction * left)
    most = settings.max_running_requests * context_length
    notes: tuple[str, ...] = ()
    if settings.max_total_tokens is not None:
        tokens = settings.max_total_tokens
        if tokens * per_token > left:
            raise InsufficientMemory(
                f"max_total_tokens is {tokens:,}, which takes {_giga(tokens * per_token)}"
                f" ({per_token:,} bytes a token), but {_giga(left)} are free on {device.type}"
                f" beside {_giga(weight_bytes)} of weights; set --max-total-tokens to at most"
                f" {max(left, 0) // per_token:,}"
            )
    else:
        tokens = min(max(share, 0) // per_token, most)
        if tokens == most:
            notes = (
                f"the pool holds max_running_requests ({settings.max_running_requests}) sequences"
                f" of context_length ({context_length}); more is not taken unless"
                " --max-total-tokens asks for it",
            )
    pages = tokens // settings.page_size
    tokens = pages * settings.page_size
    least = min(LEAST_TOKENS, context_length)
    if tokens < least:
        remedy = (
            "raise --max-total-tokens"
            if settings.max_total_tokens is not None
            else f"raise --mem-fraction-static ({fraction:g}), free memory or set a smaller --dtype"
        )
        raise InsufficientMemory(
            f"the page pool would hold {tokens:,} tokens (pages of {settings.page_size}), less than"
            f" the {least} needed to serve anything: {_giga(available_bytes)} are free on"
            f" {device.type}, weights take {_giga(weight_bytes)}, a token {per_token:,} bytes;"
            f" {remedy}"
        )
    if tokens < context_length:
        notes += (f"one sequence can have {tokens:,} tokens at most: no more fit the pool",)
    return MemoryPlan(
        weight_bytes=weight_bytes,
        kv_bytes_per_token=per_token,
        available_bytes=available_bytes,
        pool_bytes=tokens * per_token,
        pages=pages,
        page_size=settings.page_size,
        tokens=tokens,
        context_length=context_length,
        device=_device_name(device),
        dtype=precision(dtype, packing),
        notes=notes,
    )


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers. Layers with a sliding window keep all."""
    kv_heads, head_dim = kv_shape(config)
    layers: int = config.num_hidden_layers
    return 2 * layers * kv_heads * head_dim * dtype.itemsize


def kv_shape(config: PretrainedConfig) -> tuple[int, int]:
    """``(kv_heads, head_dim)`` of every layer's keys and values."""
    heads: int = config.num_attention_heads
    kv_heads: int | None = getattr(config, "num_key_value_heads", None)
    head_dim: int | None = getattr(config, "head_dim", None)
    return kv_heads or heads, head_dim or config.hidden_size // heads


def count_weight_bytes(
    config: PretrainedConfig, dtype: torch.dtype, packing: Packing | None = None
) -> int:
    """Bytes that the model's weights take, counted on a model without storage.

    Layers that turn out not to be packed (`ktserve.models.cpu_linear.pack`) may take more.
    """
    kind = architectures.model_class(config)
    with torch.device("meta"):
        model = cast("Any", kind)._from_config(config, dtype=dtype, attn_implementation="eager")
    fuse(model)
    return weight_bytes_of(model, packing)


def available_bytes(device: torch.device) -> int:
    """Bytes of memory free on ``device`` now; on the CPU no more than the control group allows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    allowed = _cgroup_bytes_left(_CGROUP)
    return free if allowed is None else min(free, allowed)


def _cgroup_bytes_left(root: Path) -> int | None:
    """What a container's limit (cgroup v2) leaves, or None without one."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = (root / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit == "max":
        return None
    # The page cache counts as used, but the kernel gives it back.
    cached = next((int(line.split()[1]) for line in stat if line.startswith("inactive_file ")), 0)
    return max(int(limit) - used + cached, 0)


def _config_of(source: ModelSource, settings: Settings) -> PretrainedConfig:
    if source.directory is None and source.gguf is not None:
        content: dict[str, Any] = gguf.read_header(source.gguf).config()
        described: PretrainedConfig = AutoConfig.for_model(**content)
        architectures.check(described)
        return described
    if source.directory is None:
        # "dummy" fetches the config and tokenizer alone.
        source = resolve(settings.model, "dummy", settings.revision, settings.cache_dir)
    if source.directory is None:
        raise AssertionError("resolve gives a directory")
    config = read_config(source.directory)
    if source.kind == "directory" and not source.dummy:
        check_weights(source.directory)
    return config


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


def _giga(count: int) -> str:
    return f"{max(count, 0) / 1e9:.2f} GB"
