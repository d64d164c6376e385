"""Where keys and values live: two tensors a layer, addressed by page."""

from __future__ import annotations

import torch


class KVStorage:
    """The keys and values of every page, on one device.

    A slot is one token's place: slot ``page * page_size + offset``. Contents are undefined until
    written; whoever reads a page must have written it or hold a lease on it.

    Attributes:
        keys: one tensor ``[pages, page_size, kv_heads, head_dim]`` for each layer.
        values: likewise.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        shape = (pages, page_size, kv_heads, head_dim)
        # Not zeroed: on the CPU a page then costs RAM only once it is written.
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
