"""Running the model over one batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ktserve.attention import AttentionBackend, KVStorage, PagedBatch
from ktserve.engine.scheduler import Batch
from ktserve.models.loading import LoadedModel
from ktserve.tokens import TOKEN_BYTES, unpack


class ModelRunner:
    """Turns a batch into logits; owns the model and the pages' contents."""

    def __init__(
        self,
        loaded: LoadedModel,
        storage: KVStorage,
        backend: AttentionBackend,
        device: torch.device,
    ) -> None:
        self._model: Any = loaded.model
        self._storage = storage
        self._backend = backend
        self._device = device

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Compute ``batch``, writing its keys and values.

        Returns:
            logits ``[samples, vocabulary]``, a row for each part that samples, in order.
        """
        page_size = self._storage.page_size
        token_ids, positions, slots, tables = [], [], [], []
        query_lens, context_lens, rows = [], [], []
        end = 0
        for sequence, tokens, samples in batch.parts:
            assert sequence.table is not None
            first, last = sequence.computed, sequence.computed + tokens
            place = np.arange(first, last)
            pages = sequence.table.pages
            token_ids.append(
                unpack(bytes(sequence.tokens[first * TOKEN_BYTES : last * TOKEN_BYTES]))
            )
            positions.append(place)
            slots.append(pages[place // page_size] * page_size + place % page_size)
            tables.append(torch.from_numpy(pages[: sequence.table.length]).to(self._device))
            query_lens.append(tokens)
            context_lens.append(last)
            end += tokens
            if samples:
                rows.append(end - 1)
        paged = PagedBatch(
            storage=self._storage,
            backend=self._backend,
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=tables,
            write_slots=self._row(slots),
        )
        output = self._model(
            input_ids=self._row(token_ids)[None],
            position_ids=self._row(positions)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=self._device),
            paged=paged,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _row(self, parts: list[Any]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(self._device)
