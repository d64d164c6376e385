"""Packed linear layers: near the plain ones, and each row the same whatever is beside it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ktserve.models import cpu_linear
from ktserve.models.cpu_linear import (
    Float16Linear,
    Float32Linear,
    InvalidCpuWeights,
    Packing,
    choose,
    pack,
    precision,
    weight_bytes_of,
)
from ktserve.models.fusing import fuse
from ktserve.models.row_padding import PERIOD, padding_for

CPU = torch.device("cpu")

PACKAGED_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
"""Outputs and inputs in the packaged model: q/k/v, o, gate/up, down, head."""


def available(kind: Packing) -> object:
    fault = cpu_linear._fault_of(kind)
    return pytest.param(
        kind, id=kind.label, marks=pytest.mark.skipif(fault is not None, reason=str(fault))
    )


KINDS = [available(Float16Linear), available(Float32Linear)]
needs_float16 = pytest.mark.skipif(
    cpu_linear._fault_of(Float16Linear) is not None, reason="no packed float16 weights here"
)
TOLERANCE = {"float16": 2e-3, "float32": 1e-5}


def make_linear(outputs: int, inputs: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(outputs + inputs)
    linear = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    linear.weight.normal_(std=0.05)
    return linear


def packed(kind: Packing, linear: nn.Linear) -> nn.Module:
    """``linear`` as `pack` leaves it."""
    holder = nn.Sequential(linear)
    assert pack(holder, kind) == ()
    return holder[0]


class Block(nn.Module):
    """Projections as the models have them, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(50, 24)
        self.q_proj = nn.Linear(24, 24)
        self.k_proj = nn.Linear(24, 8)
        self.v_proj = nn.Linear(24, 8)
        self.o_proj = nn.Linear(40, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        parts = [self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)]
        logits: torch.Tensor = self.head(self.norm(self.o_proj(torch.cat(parts, dim=-1))))
        return logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 3), (5,), (1, 0), ()])
def test_the_product_is_near_the_plain_one(
    kind: Packing, bias: bool, shape: tuple[int, ...]
) -> None:
    linear = make_linear(41, 600, bias=bias)
    hidden = torch.randn(*shape, 600)
    expected = linear(hidden)
    actual = packed(kind, linear)(hidden)
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    if actual.numel():
        error = (actual - expected).norm() / expected.norm()
        assert error.item() <= TOLERANCE[kind.label]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", PACKAGED_SHAPES, ids=str)
def test_a_row_is_the_same_alone_and_in_every_batch(kind: Packing, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    layer = packed(kind, make_linear(outputs, inputs))
    rows = torch.randn(80, inputs)
    alone = torch.cat([layer(row[None]) for row in rows[:40]])
    for count in range(1, 41):
        together = layer(rows[:count][None])[0]
        assert torch.equal(together, alone[:count]), f"{count} rows"
        turned = layer(rows[:count].flip(0))
        assert torch.equal(turned.flip(0), alone[:count]), f"{count} rows, turned"


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_a_whole_prompt(kind: Packing) -> None:
    layer = packed(kind, make_linear(96, 576))
    rows = torch.randn(544, 576)
    alone = torch.cat([layer(row[None]) for row in rows])
    for count in (41, 119, 120, 121, 122, 127, 128, 241, 247, 444, 511, 512, 513, 544):
        assert torch.equal(layer(rows[:count]), alone[:count]), f"{count} rows"


_OTHER_KERNELS = """
import torch
from torch import nn
from ktserve.models.cpu_linear import Float16Linear
linear = nn.Linear(576, 64).requires_grad_(False)
layer = Float16Linear(linear)
rows = torch.randn(130, 576)
def differing(first):
    alone = torch.cat([layer(row[None]) for row in rows])
    return [n for n in range(first, 131) if not torch.equal(layer(rows[:n]), alone[:n])]
print(len(differing(2)))
layer.padding = layer.measure_padding()
print(len(differing(2)))
"""


@needs_float16
def test_padding_mends_the_kernels_of_processors_without_avx512() -> None:
    """fbgemm can be told to use them. A third of the batches differ there, before padding."""
    environment = {**os.environ, "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_KERNELS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    without, with_padding = (int(word) for word in done.stdout.split())
    assert with_padding == 0
    if not without:
        pytest.skip("this processor's kernels need no padding, and others cannot be had")


def odd_product(odd: Callable[[int], bool]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A product that rounds otherwise for some counts of rows."""
    return lambda rows: rows * 2 + (1e-3 if odd(len(rows)) else 0)


def test_counts_that_differ_are_padded_to_the_next_that_does_not() -> None:
    assert padding_for(odd_product(lambda count: count % 6 in (1, 2)), 4, 14) == {
        **{1: 2, 2: 1},
        **{7: 2, 8: 1},
        **{13: 2, 14: 1},
    }
    assert padding_for(odd_product(lambda _: False), 4, 14) == {}


def test_what_padding_cannot_mend_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert padding_for(odd_product(lambda count: count < 2 * PERIOD), 4, PERIOD) == {}
    assert "a text may depend on what shares its steps" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_padded_and_cut_again(kind: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = kind(make_linear(16, 32))
    layer.padding = {3: 2}
    counts: list[int] = []
    multiply = layer.multiply

    def counted(rows: torch.Tensor) -> torch.Tensor:
        counts.append(rows.numel() // 32)
        return multiply(rows)

    monkeypatch.setattr(layer, "multiply", counted)
    for count in (3, 4, PERIOD + 3):
        assert layer(torch.randn(1, count, 32)).shape == (1, count, 16)
    assert counts == [5, 4, PERIOD + 5]


@needs_float16
@pytest.mark.parametrize(
    ("spoil", "fits"),
    [
        (lambda _: None, True),
        (lambda weight: weight[3].zero_(), True),
        (lambda weight: weight[3, 5].fill_(65504.0), True),
        (lambda weight: weight[3, 5].fill_(70000.0), False),
        (lambda weight: weight[3].mul_(1e-5), False),
        (lambda weight: weight[3, 5].fill_(float("nan")), False),
        (lambda weight: weight[3, 5].fill_(float("inf")), False),
    ],
    ids=["plain", "zeros", "largest", "too large", "too small", "nan", "infinite"],
)
def test_weights_outside_of_float16_stay_float32(
    spoil: Callable[[torch.Tensor], object], fits: bool
) -> None:
    model = nn.Sequential(make_linear(8, 16), make_linear(8, 8))
    spoil(model[0].weight)
    assert pack(model, Float16Linear) == (() if fits else ("0",))
    assert isinstance(model[0], Float16Linear) is fits
    assert isinstance(model[1], Float16Linear), "the control: the other layer is packed"


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_is_packed_merged_ones_and_the_head_too(kind: Packing) -> None:
    plain, model = Block(), Block()
    assert fuse(model) == 1
    counted = weight_bytes_of(model, kind)
    assert pack(model, kind) == ()
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert sum(isinstance(module, kind) for module in model.modules()) == 3
    assert isinstance(model.embed.weight, nn.Parameter), "the look-up keeps its own"
    assert weight_bytes_of(model) == counted
    ids = torch.arange(9)[None]
    expected = plain(ids)
    error = (model(ids) - expected).norm() / expected.norm()
    assert error.item() <= TOLERANCE[kind.label]


def test_bytes_are_those_of_fbgemms_blocks() -> None:
    assert Float16Linear.bytes_for(make_linear(16, 512)) == 2 * 16 * 512
    assert Float16Linear.bytes_for(make_linear(17, 513, bias=True)) == 2 * 32 * 1024 + 4 * 17
    assert Float32Linear.bytes_for(make_linear(17, 513, bias=True)) == 4 * 17 * 513 + 4 * 17


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_at_most_exists_twice(kind: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(make_linear(8, 8) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []
    takes = kind.takes

    def counting(weight: torch.Tensor) -> bool:
        alive.append(sum(reference() is not None for reference in weights))
        return takes(weight)

    monkeypatch.setattr(kind, "takes", counting)
    pack(model, kind)
    assert alive == [4, 3, 2, 1]
    assert all(reference() is None for reference in weights[:3])


def test_the_choice() -> None:
    before = torch.random.get_rng_state()
    assert choose("auto", torch.float32, CPU) in (Float16Linear, Float32Linear, None)
    assert choose("auto", torch.bfloat16, CPU) is None
    assert choose("auto", torch.float32, torch.device("cuda")) is None
    assert torch.equal(before, torch.random.get_rng_state()), "trying draws nothing"
    with pytest.raises(
        InvalidCpuWeights, match=r"cpu_weights is float16.*cpu in bfloat16.*--dtype"
    ):
        choose("float16", torch.bfloat16, CPU)
    with pytest.raises(InvalidCpuWeights, match=r"cpu_weights is float32.*on cuda"):
        choose("float32", torch.float32, torch.device("cuda"))


@pytest.mark.parametrize(
    ("lacking", "setting", "chosen"),
    [
        ((), "auto", Float16Linear),
        ((), "float16", Float16Linear),
        ((), "float32", Float32Linear),
        ((Float16Linear,), "auto", Float32Linear),
        ((Float16Linear,), "float32", Float32Linear),
        ((Float16Linear, Float32Linear), "float16", None),
        ((Float32Linear,), "float32", None),
    ],
)
def test_an_operator_that_is_lacking_is_replaced_and_said(
    lacking: tuple[Packing, ...],
    setting: str,
    chosen: Packing | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cpu_linear, "_fault_of", lambda kind: "gone" if kind in lacking else None)
    with caplog.at_level(logging.WARNING):
        assert choose(setting, torch.float32, CPU) is chosen
    tried = [kind for kind in lacking if setting != "float32" or kind is Float32Linear]
    for kind in tried:
        assert f"packed {kind.label} weights here (gone)" in caplog.text
    assert ("weights stay float32" in caplog.text) is (chosen is None)
    assert bool(caplog.text) is bool(tried)


def test_what_is_wrong_with_an_operator_is_found() -> None:
    fault_of = cpu_linear._fault_of

    class Renamed(Float32Linear):
        def multiply(self, rows: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch.ops.mkldnn._no_such_operator(rows)
            return product

    class Wrong(Renamed):
        def multiply(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.zeros(rows.shape[0], self.out_features)

    assert "_no_such_operator" in (fault_of(Renamed) or "")
    assert "off by" in (fault_of(Wrong) or "")


def test_precision_in_words() -> None:
    assert precision(torch.float32, None) == "float32"
    assert precision(torch.float32, Float16Linear) == "float32, weights float16 (packed)"
    assert (
        precision(torch.float32, Float16Linear, 2)
        == "float32, weights float16 (packed; layers in float32: 2)"
    )
