"""How many tokens a step may have: what the settings come to on a device and for a model."""

from __future__ import annotations

from ktserve.config import Settings
from ktserve.engine.scheduler import SchedulerLimits

CPU_PREFILL_TOKENS = 512
CUDA_PREFILL_TOKENS = 2048


def scheduler_limits(settings: Settings, context_length: int, device_type: str) -> SchedulerLimits:
    """The scheduler's limits.

    Args:
        context_length: the most tokens of one sequence, and so of a whole prompt.
        device_type: ``cpu`` or ``cuda``.
    """
    prefill = settings.chunked_prefill_size
    if prefill is None:
        prefill = CUDA_PREFILL_TOKENS if device_type == "cuda" else CPU_PREFILL_TOKENS
    elif prefill == -1:
        prefill = context_length
    batched = settings.max_num_batched_tokens
    if batched is None:
        batched = prefill + settings.max_running_requests
    return SchedulerLimits(
        max_running=settings.max_running_requests,
        max_queued=settings.max_queued_requests,
        max_batched_tokens=batched,
        prefill_tokens=prefill,
        policy=settings.schedule_policy,
    )
