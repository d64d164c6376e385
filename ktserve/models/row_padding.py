"""Which counts of rows a product computes by other sums, and how many zero rows avoid them.

A row's result must not depend on the rows beside it, or one tenant's requests would change
another's text. A product computes most counts of rows by the same sums and some by others. Which
ones depends on the processor, so they are measured there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

logger = logging.getLogger(__name__)

PERIOD = 120
"""fbgemm computes at most so many rows at a time. The remainder alone decides on its kernels."""

MOST_EXTRA = 8
"""Zero rows that are worth adding. Where more were needed, none are added."""


def padding_for(
    multiply: Callable[[torch.Tensor], torch.Tensor], inputs: int, most: int
) -> Mapping[int, int]:
    """The zero rows to add to each count of rows, so that every row's result is always the same.

    Counts from 1 to ``most`` are compared, bit by bit, with a product of twice as many rows.

    Returns:
        count modulo `PERIOD` to rows, without those that need none; empty, with a warning, where
        zero rows cannot help.
    """
    rows = torch.randn(2 * most, inputs, generator=torch.Generator().manual_seed(0))
    reference = multiply(rows)
    odd = set()
    for count in range(1, most + 1):
        # Each count begins elsewhere: a row's place must not matter either.
        part = slice(count, 2 * count)
        if not torch.equal(multiply(rows[part].contiguous()), reference[part]):
            odd.add(count % PERIOD)
    padding = {}
    for count in sorted(odd):
        free = (more for more in range(1, PERIOD) if (count + more) % PERIOD not in odd)
        padding[count] = next(free, PERIOD)
    if padding and max(padding.values()) > MOST_EXTRA:
        logger.warning(
            "the product of packed weights (%d inputs) differs with the count of rows, in its last"
            " bits, on this processor: a text may depend on what shares its steps",
            inputs,
        )
        return {}
    return padding
