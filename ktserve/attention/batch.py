"""The layout of one step: which tokens of the packed row belong to which sequence and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ktserve.attention.backend import AttentionBackend, AttentionPlan
from ktserve.attention.storage import KVStorage


@dataclass(slots=True)
class PagedBatch:
    """Sequences packed one after another into a single row of ``sum(query_lens)`` tokens.

    Of sequence i, ``context_lens[i]`` tokens exist once this step's are written, and its last
    ``query_lens[i]`` of them are this step's::

        |<---- in pages already ---->|<-- query_lens[i] -->|
        |<-------------- context_lens[i] ----------------->|

    Attributes:
        storage: the pages.
        backend: the attention backend that runs this step.
        query_lens: tokens of this step, for each sequence, at least 1.
        context_lens: tokens up to and including this step, for each sequence.
        block_tables: for each sequence its pages in order, int64 ``[>= ceil(context / page)]``.
        write_slots: int64 ``[tokens]``: where each token of the row is written.
        plan: what the backend computed once for all layers of the step.
    """

    storage: KVStorage
    backend: AttentionBackend
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[torch.Tensor]
    write_slots: torch.Tensor
    plan: AttentionPlan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.backend.plan(self)
