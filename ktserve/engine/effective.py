"""What the settings that are left to the machine and the model come to, before anything is loaded.

Each is found by what the server finds it with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

import torch

from ktserve import runtime_dir
from ktserve.attention import create_backend
from ktserve.config import Settings
from ktserve.engine.limits import scheduler_limits
from ktserve.models import cpu_linear, loading, memory
from ktserve.models.source import check_weights, default_cache_dir, locate, resolve
from ktserve.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from ktserve.models.memory import MemoryPlan


def effective_settings(settings: Settings, plan: MemoryPlan) -> Settings:
    """``settings`` as a server of them would run: what was "auto", None or -1 is filled in.

    What stays None is nothing that the server chooses: no key, no certificate.

    Args:
        plan: `ktserve.models.memory.plan` of ``settings``.

    Raises:
        ValueError: the model on this machine lacks weights or has no revisions, or its tokenizer or
            chat template cannot be used.
    """
    source = locate(settings.model, settings.load_format, settings.cache_dir)
    if source.directory is not None:
        # Nothing is left to be fetched or converted.
        resolve(settings.model, settings.load_format, settings.revision, settings.cache_dir)
        if not source.dummy:
            check_weights(source.directory)
        load_tokenizer(source.directory, settings.chat_template)
    device = loading.choose_device(settings.device)
    on_cuda = device.type == "cuda"
    # The plan's words go on with the weights' precision, where that is another.
    dtype = cast("Literal['float32', 'bfloat16', 'float16']", plan.dtype.partition(",")[0])
    packing = cpu_linear.choose(settings.cpu_weights, loading.DTYPES[dtype], device)
    limits = scheduler_limits(settings, plan.context_length, device.type)
    return replace(
        settings,
        served_model_name=settings.served_model_name or source.name,
        load_format=_load_format(settings, in_gguf=source.gguf is not None),
        cache_dir=settings.cache_dir or str(default_cache_dir()),
        context_length=plan.context_length,
        dtype=dtype,
        max_total_tokens=settings.max_total_tokens or plan.tokens,
        mem_fraction_static=settings.mem_fraction_static
        or (memory.CUDA_FRACTION if on_cuda else memory.CPU_FRACTION),
        chunked_prefill_size=limits.prefill_tokens,
        max_num_batched_tokens=limits.max_batched_tokens,
        device="cuda" if on_cuda else "cpu",
        attention_backend=cast("Literal['torch']", create_backend(settings.attention_backend).name),
        cpu_threads=settings.cpu_threads or torch.get_num_threads(),
        cpu_weights=_cpu_weights(settings, packing),
        runtime_dir=settings.runtime_dir or str(runtime_dir.locate(settings)),
    )


def _load_format(settings: Settings, *, in_gguf: bool) -> Literal["safetensors", "gguf", "dummy"]:
    if settings.load_format != "auto":
        return settings.load_format
    return "gguf" if in_gguf else "safetensors"


def _cpu_weights(
    settings: Settings, packing: cpu_linear.Packing | None
) -> Literal["auto", "float32", "float16"]:
    """Where layers are not packed, they have the model's precision, and "auto" stays."""
    if packing is None:
        return settings.cpu_weights
    return cast("Literal['float32', 'float16']", packing.label)
