"""Merged projections: the same outputs, and no activation held longer than needed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from ktserve.models.fusing import MergedLinear, MergedPart, fuse


class Attention(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=bias)
        self.k_proj = nn.Linear(8, 6, bias=bias)
        self.v_proj = nn.Linear(8, 4, bias=bias)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.v_proj(hidden), self.q_proj(hidden), self.k_proj(hidden)


def make_pair(*, bias: bool = True) -> tuple[Attention, Attention]:
    torch.manual_seed(0)
    plain = Attention(bias=bias).requires_grad_(False)
    fused = Attention(bias=bias).requires_grad_(False)
    fused.load_state_dict(plain.state_dict())
    assert fuse(fused) == 1
    return plain, fused


@pytest.mark.parametrize("bias", [True, False])
def test_each_sibling_gets_its_slice_in_any_order(bias: bool) -> None:
    plain, fused = make_pair(bias=bias)
    for _ in range(2):
        hidden = torch.randn(2, 5, 8)
        for expected, actual in zip(plain(hidden), fused(hidden), strict=True):
            torch.testing.assert_close(actual, expected)


def test_no_activation_is_held_after_the_last_sibling() -> None:
    _, fused = make_pair()
    hidden = torch.randn(1, 5, 8)
    input_ref = weakref.ref(hidden)
    outputs = [fused.q_proj(hidden), fused.k_proj(hidden)]
    product_ref = weakref.ref(outputs[0])
    held = fused.q_proj.merged
    assert held._input is hidden, "the control: a sibling is still to come"
    outputs.append(fused.v_proj(hidden))
    del hidden, outputs
    gc.collect()
    assert input_ref() is None
    assert product_ref() is None
    assert not held._waiting


def test_a_forward_that_was_cut_short_does_not_reach_the_next() -> None:
    plain, fused = make_pair()
    fused.q_proj(torch.zeros(1, 5, 8))
    hidden = torch.randn(1, 5, 8)
    torch.testing.assert_close(fused.k_proj(hidden), plain.k_proj(hidden))
    torch.testing.assert_close(fused.k_proj(hidden), plain.k_proj(hidden))


def test_weights_exist_once() -> None:
    plain, fused = make_pair()
    original = weakref.ref(Attention().q_proj)
    assert original() is None, "the control: a dropped module is freed at once"
    assert isinstance(fused.q_proj, MergedPart)
    assert fused.q_proj.merged is fused.k_proj.merged is fused.v_proj.merged
    count = sum(p.numel() for p in fused.parameters())
    assert count == sum(p.numel() for p in plain.parameters())


def test_projections_that_differ_stay_apart() -> None:
    class Scaled(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 2

    for name, other in {
        "k_proj": nn.Linear(8, 6, bias=False),
        "v_proj": nn.Linear(9, 4),
        "q_proj": Scaled(8, 12),
    }.items():
        module = Attention()
        setattr(module, name, other)
        assert fuse(module) == 0
        assert not any(isinstance(child, MergedLinear) for child in module.modules())
    assert fuse(Attention()) == 1
