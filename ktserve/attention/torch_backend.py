"""Paged attention in plain torch: the CPU's backend, and the reference for the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ktserve.attention.batch import PagedBatch
from ktserve.kernels.paged_attention import attend, causal_mask, gather_pages, write_pages


@dataclass(slots=True)
class TorchPlan:
    """The causal masks of a step, made when the first layer needs one.

    Attributes:
        masks: (sequence, sliding window) to its mask ``[query, context]``.
    """

    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)


class TorchBackend:
    """One sequence at a time: gather its pages, then scaled dot-product attention.

    Sequences are not padded to each other, so that a sequence's sums have the same shape and order
    whatever else is in the step.
    """

    name = "torch"

    def plan(self, batch: PagedBatch) -> TorchPlan:  # noqa: ARG002 (the protocol's signature)
        return TorchPlan()

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
        keys, values = batch.storage.keys[layer], batch.storage.values[layer]
        write_pages(keys, key, batch.write_slots)
        write_pages(values, value, batch.write_slots)
        output = torch.empty_like(query)
        start = 0
        for index, query_len in enumerate(batch.query_lens):
            context = batch.context_lens[index]
            table = batch.block_tables[index]
            first = 0
            if sliding_window is not None:
                # Pages before the window of the first query token are never looked at.
                first = max(0, context - query_len - sliding_window + 1)
                first -= first % batch.storage.page_size
            output[start : start + query_len] = attend(
                query[start : start + query_len],
                gather_pages(keys, table, first, context),
                gather_pages(values, table, first, context),
                mask=self._mask(batch, index, first, sliding_window),
                scaling=scaling,
                softcap=softcap,
            )
            start += query_len
        return output

    def _mask(
        self, batch: PagedBatch, index: int, first: int, sliding_window: int | None
    ) -> torch.Tensor | None:
        plan = batch.plan
        assert isinstance(plan, TorchPlan)
        if (index, sliding_window) not in plan.masks:
            plan.masks[index, sliding_window] = causal_mask(
                batch.query_lens[index],
                batch.context_lens[index],
                first,
                sliding_window,
                batch.write_slots.device,
            )
        return plan.masks[index, sliding_window]
