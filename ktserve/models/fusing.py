"""One matrix product for projections that read the same input: q, k and v; gate and up.

The families' forward code stays transformers' own. Each projection is replaced by a part of a
merged one: the first part that is called with an input computes the product for all, and its
siblings, called with the same tensor, take their slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling projections, in the order in which they are merged."""


class MergedLinear(nn.Module):
    """Sibling projections as one, ``[sum of their outputs, inputs]``.

    It holds an input and its products only while siblings have still to take theirs.

    Attributes:
        product: the one linear layer, which may be replaced by another with the same results.
    """

    def __init__(self, projections: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [projection.out_features for projection in projections]
        weight = torch.cat([projection.weight.detach() for projection in projections])
        biases = [p.bias.detach() for p in projections if p.bias is not None]
        with torch.device("meta"):
            product = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases))
        product.weight = nn.Parameter(weight, requires_grad=False)
        if biases:
            product.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        self.product: nn.Module = product
        self._input: torch.Tensor | None = None
        self._waiting: dict[int, torch.Tensor] = {}

    def take(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output ``[..., sizes[index]]`` of one sibling for the input ``hidden``."""
        if self._input is not hidden or index not in self._waiting:
            product = self.product(hidden)
            self._input = hidden
            self._waiting = dict(enumerate(torch.split(product, self.sizes, dim=-1)))
        output = self._waiting.pop(index)
        if not self._waiting:
            self._input = None
        return output


class MergedPart(nn.Module):
    """Stands where one of the merged projections stood."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged = merged
        self.index = index

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.merged.take(self.index, hidden)


def fuse(model: nn.Module) -> int:
    """Merge every group of sibling projections of ``model``, in place.

    The originals are dropped group by group, so at most one group's weights exist twice. Experts
    whose weights are one tensor, not linear layers, stay as they are.

    Returns:
        how many groups were merged.
    """
    merged_groups = 0
    # Of linear layers no reference is kept: it would hold their weights.
    for module in [m for m in model.modules() if type(m) is not nn.Linear]:
        for names in GROUPS:
            projections = [getattr(module, name, None) for name in names]
            linears = [p for p in projections if type(p) is nn.Linear]
            if len(linears) < len(names) or not _alike(linears):
                continue
            merged = MergedLinear(linears)
            for index, name in enumerate(names):
                setattr(module, name, MergedPart(merged, index))
            merged_groups += 1
    return merged_groups


def _alike(linears: Sequence[nn.Linear]) -> bool:
    """Whether one matrix product can stand for all: same inputs, type, place and use of a bias."""
    kinds = {
        (linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None)
        for linear in linears
    }
    return len(kinds) == 1
