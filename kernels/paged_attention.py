"""Attention over paged keys and values, in torch operators.

The functions take tensors alone and know nothing of requests. `attend_reference` is the plain
definition that every attention kernel is tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def write_pages(pages: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``rows[i]`` into slot ``slots[i]``.

    Args:
        pages: ``[pages, page_size, kv_heads, head_dim]``, changed in place.
        rows: ``[tokens, kv_heads, head_dim]``.
        slots: int64 ``[tokens]``, all different.
    """
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, rows)


def gather_pages(pages: torch.Tensor, table: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """The rows of tokens ``first`` to ``end`` of a sequence.

    Args:
        pages: ``[pages, page_size, kv_heads, head_dim]``.
        table: int64, the sequence's pages in order.
        first: a multiple of the page size.
        end: at most ``len(table) * page_size``.

    Returns:
        ``[end - first, kv_heads, head_dim]``.
    """
    page_size = pages.shape[1]
    used = table[first // page_size : -(-end // page_size)]
    return pages.index_select(0, used).flatten(0, 1)[: end - first]


def causal_mask(
    query_len: int, context: int, first: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Which of the tokens ``first`` to ``context`` each of the last ``query_len`` may see.

    Returns:
        bool ``[query_len, context - first]``, or None where each may see all of them.
    """
    narrow = sliding_window is not None and context - first > sliding_window
    if query_len == 1 and not narrow:
        return None
    query = torch.arange(context - query_len, context, device=device)[:, None]
    key = torch.arange(first, context, device=device)[None, :]
    mask = key <= query
    if sliding_window is not None:
        mask &= key > query - sliding_window
    return mask


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one sequence with grouped query heads.

    Args:
        query: ``[query, heads, head_dim]``.
        keys: ``[context, kv_heads, head_dim]``; heads is a multiple of kv_heads.
        values: likewise.
        mask: bool ``[query, context]``, True where a query may look; None is everywhere.
        scaling: factor on the scores.
        softcap: scores become ``softcap * tanh(score / softcap)``; None is off.

    Returns:
        ``[query, heads, head_dim]``.
    """
    if softcap is not None:
        return attend_reference(query, keys, values, mask=mask, scaling=scaling, softcap=softcap)
    query_len, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    if query_len == 1 and mask is None:
        # The query heads of a group become rows over their shared keys: nothing is expanded.
        grouped = query.view(1, kv_heads, heads // kv_heads, head_dim)
        output = F.scaled_dot_product_attention(
            grouped, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], scale=scaling
        )
        return output.reshape(1, heads, head_dim)
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=None if mask is None else mask[None, None],
        scale=scaling,
        enable_gqa=heads != kv_heads,
    )
    return output[0].transpose(0, 1)


def attend_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """`attend`, written as its definition."""
    group = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask[None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
