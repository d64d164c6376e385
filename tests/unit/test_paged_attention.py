"""The attention kernels against their plain definition."""

from __future__ import annotations

import pytest
import torch

from ktserve.kernels.paged_attention import (
    attend,
    attend_reference,
    causal_mask,
    gather_pages,
    write_pages,
)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize(("query", "context"), [(1, 1), (1, 33), (5, 5), (7, 40)])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attend_is_its_definition(heads, head_dim, query, context, window, softcap):
    torch.manual_seed(query * context)
    q = torch.randn(query, heads[0], head_dim)
    k, v = torch.randn(2, context, heads[1], head_dim)
    mask = causal_mask(query, context, 0, window, q.device)
    options = {"mask": mask, "scaling": 0.3, "softcap": softcap}
    expected = attend_reference(q, k, v, **options)
    assert torch.allclose(attend(q, k, v, **options), expected, atol=1e-5)
    if context > 1:
        # The definition itself depends on what it should: the last value counts for the last query.
        assert not torch.allclose(
            attend_reference(q, k, v.index_fill(0, torch.tensor([context - 1]), 9.0), **options),
            expected,
        )


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("first", [0, 4])
def test_the_mask_is_causal_and_within_the_window(window, first):
    query, context = 3, 12
    mask = causal_mask(query, context, first, window, torch.device("cpu"))
    assert mask is not None
    for row in range(query):
        position = context - query + row
        for column in range(context - first):
            key = first + column
            seen = key <= position and (window is None or key > position - window)
            assert bool(mask[row, column]) == seen


def test_one_query_that_sees_everything_needs_no_mask():
    device = torch.device("cpu")
    assert causal_mask(1, 9, 0, None, device) is None
    assert causal_mask(1, 9, 0, 9, device) is None
    assert causal_mask(1, 9, 0, 8, device) is not None


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("end", [1, 5, 8])
def test_what_is_written_is_gathered_in_order_and_nothing_else(page_size, end):
    pages = torch.full((9, page_size, 2, 3), float("nan"))
    table = torch.tensor([7, 2, 5, 0, 8, 1, 3, 6])[: -(-8 // page_size)]
    rows = torch.randn(end, 2, 3)
    place = torch.arange(end)
    write_pages(pages, rows, table[place // page_size] * page_size + place % page_size)
    assert torch.equal(gather_pages(pages, table, 0, end), rows)
    assert int(pages.isnan().any(-1).any(-1).logical_not().sum()) == end
    if end > 4:
        assert torch.equal(gather_pages(pages, table, 4, end), rows[4:])
