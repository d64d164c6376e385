"""Linear layers on the CPU whose weights are packed once, when the model is loaded.

torch's plain product lays a weight out for its kernel again at every call. Two of its operators
take a weight that was laid out before: oneDNN's, in float32, and fbgemm's, whose weights are
float16 and whose activations and sums are float32. Neither is a public interface, so both are tried
before they are used.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from ktserve.models.row_padding import PERIOD, padding_for

logger = logging.getLogger(__name__)

FEW = 8
"""oneDNN's counts of rows that are measured; its kernels for more have been found alike."""

FLOAT16_ERROR = 2.0**-10
"""The largest error of a row of weights in float16, relative to its norm. Rounding alone gives at
most half of it; above are rows that overflow, or whose weights are too small for float16."""

_CHUNK = 4096
"""Rows of a weight looked at together, so that checking takes little memory."""

_FBGEMM_INPUTS, _FBGEMM_OUTPUTS = 512, 16
"""fbgemm packs whole blocks of so many inputs and outputs."""


class InvalidCpuWeights(ValueError):
    """The setting cannot be honoured with the precision or device; the message has the remedy."""


class PackedLinear(nn.Module, ABC):
    """A linear layer behind a packed operator, float32 in and out, instead of a `torch.nn.Linear`.

    Attributes:
        label: the precision of the weights.
        weight_bytes: bytes of the packed weights and the bias.
        padding: rows modulo `PERIOD` to the zero rows that are added; absent is none.
    """

    label: ClassVar[str]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight_bytes = self.bytes_for(linear)
        self.padding: Mapping[int, int] = {}

    @classmethod
    @abstractmethod
    def bytes_for(cls, linear: nn.Linear) -> int:
        """The bytes that ``linear`` takes once packed. It may be without storage."""

    @classmethod
    @abstractmethod
    def takes(cls, weight: torch.Tensor) -> bool:
        """Whether ``weight`` can be held without losing more than rounding loses."""

    @abstractmethod
    def measure_padding(self) -> Mapping[int, int]:
        """`padding` for layers of this shape on this processor."""

    @abstractmethod
    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """The operator alone: ``[..., inputs]`` to ``[..., outputs]``."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        count = hidden.numel() // self.in_features
        extra = self.padding.get(count % PERIOD, 0)
        if not extra and hidden.dim() > 1:
            return self.multiply(hidden)
        rows = functional.pad(hidden.reshape(count, self.in_features), (0, 0, 0, extra))
        return self.multiply(rows)[:count].view(*hidden.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.label}"


class Float16Linear(PackedLinear):
    """fbgemm: float16 weights, float32 activations and sums."""

    label = "float16"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        bias = None if linear.bias is None else linear.bias.detach()
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), bias)

    @classmethod
    def bytes_for(cls, linear: nn.Linear) -> int:
        inputs = -(-linear.in_features // _FBGEMM_INPUTS) * _FBGEMM_INPUTS
        outputs = -(-linear.out_features // _FBGEMM_OUTPUTS) * _FBGEMM_OUTPUTS
        return 2 * inputs * outputs + _bias_bytes(linear)

    @classmethod
    def takes(cls, weight: torch.Tensor) -> bool:
        for rows in torch.split(weight.detach(), _CHUNK):
            error = torch.linalg.vector_norm(rows - rows.half().float(), dim=1)
            # An infinite or undefined error is not within the limit either.
            within = error <= FLOAT16_ERROR * torch.linalg.vector_norm(rows, dim=1)
            if not bool(within.all()):
                return False
        return True

    def measure_padding(self) -> Mapping[int, int]:
        return _fbgemm_padding()

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self._packed)
        return product


class Float32Linear(PackedLinear):
    """oneDNN: float32 throughout."""

    label = "float32"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @classmethod
    def bytes_for(cls, linear: nn.Linear) -> int:
        return 4 * linear.in_features * linear.out_features + _bias_bytes(linear)

    @classmethod
    def takes(cls, weight: torch.Tensor) -> bool:  # noqa: ARG003 (nothing is lost)
        return True

    def measure_padding(self) -> Mapping[int, int]:
        return padding_for(self.multiply, self.in_features, FEW)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return product


Packing = type[PackedLinear]


def choose(setting: str, dtype: torch.dtype, device: torch.device) -> Packing | None:
    """How the setting ``cpu_weights`` packs a model in ``dtype`` on ``device``; None is not at all.

    "auto" is float16 on the CPU in float32, and nothing elsewhere. An operator that this torch
    lacks is replaced by the next: float16, float32, `torch.nn.Linear`; a warning says so.

    Raises:
        InvalidCpuWeights: weights are asked for where they are not packed.
    """
    if device.type != "cpu" or dtype != torch.float32:
        if setting == "auto":
            return None
        name = str(dtype).removeprefix("torch.")
        raise InvalidCpuWeights(
            f"cpu_weights is {setting}, which is for the CPU in float32, but the model runs on"
            f" {device.type} in {name}; leave --cpu-weights out, or set --device cpu and"
            " --dtype float32"
        )
    kinds: list[Packing] = (
        [Float32Linear] if setting == "float32" else [Float16Linear, Float32Linear]
    )
    for kind in kinds:
        fault = _fault_of(kind)
        if fault is None:
            return kind
        logger.warning(
            "torch %s cannot multiply by packed %s weights here (%s); cpu_weights falls back",
            torch.__version__,
            kind.label,
            fault,
        )
    logger.warning("weights stay float32 and are not packed: the model runs slower")
    return None


def precision(dtype: torch.dtype, packing: Packing | None, unpacked: int = 0) -> str:
    """The precision in words: of activations and pages, then of packed weights.

    Args:
        unpacked: layers that stay as they are.
    """
    name = str(dtype).removeprefix("torch.")
    if packing is None:
        return name
    exceptions = f"; layers in {name}: {unpacked}" if unpacked else ""
    return f"{name}, weights {packing.label} (packed{exceptions})"


def pack(model: nn.Module, packing: Packing) -> tuple[str, ...]:
    """Replace every `torch.nn.Linear` of ``model``, which is on the CPU in float32, in place.

    A layer's own weight is freed before the next one is packed. The weight of a head that is also
    the embedding is then held twice: packed, and as it was for the look-up.

    Returns:
        the names of layers that ``packing`` does not take; they stay as they are.
    """
    unpacked: list[str] = []
    paddings: dict[tuple[int, int], Mapping[int, int]] = {}
    # Of linear layers no reference is kept: it would hold their weights.
    parents = [found for found in model.named_modules() if type(found[1]) is not nn.Linear]
    for path, parent in parents:
        for name in [name for name, child in parent.named_children() if type(child) is nn.Linear]:
            linear: nn.Linear = getattr(parent, name)
            if not packing.takes(linear.weight):
                unpacked.append(f"{path}.{name}" if path else name)
                continue
            packed = packing(linear)
            shape = (linear.in_features, linear.out_features)
            if shape not in paddings:
                paddings[shape] = packed.measure_padding()
            packed.padding = paddings[shape]
            setattr(parent, name, packed)
    return tuple(unpacked)


def weight_bytes_of(model: nn.Module, packing: Packing | None = None) -> int:
    """Bytes of the parameters, buffers and packed weights, shared ones counted once.

    Args:
        packing: count as if its linear layers were packed so; ``model`` may be without storage.
    """
    tensors: dict[int, torch.Tensor] = {}
    packed = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            packed += module.weight_bytes
        elif packing is not None and type(module) is nn.Linear:
            packed += packing.bytes_for(module)
        else:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensors[id(tensor)] = tensor
    return packed + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@functools.cache
def _fbgemm_padding() -> Mapping[int, int]:
    """fbgemm's padding is that of the processor: its kernels are alike for all shapes."""
    # More inputs than one block has, and more outputs.
    linear = _random_linear(3 * _FBGEMM_OUTPUTS + 8, _FBGEMM_INPUTS + 64)
    return padding_for(Float16Linear(linear).multiply, linear.in_features, PERIOD)


def _fault_of(packing: Packing) -> str | None:
    """Why ``packing`` cannot be used in this torch and on this processor; None is that it can."""
    linear = _random_linear(40, 48)
    rows = torch.linspace(-1, 1, 5 * 48).view(5, 48)
    expected = linear(rows)
    try:
        difference = float((packing(linear).multiply(rows) - expected).abs().max())
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    # Products here have a size of about 4, and float16 an error of 2^-11.
    return None if difference < 0.02 else f"its results are off by {difference:.2g}"


def _random_linear(outputs: int, inputs: int) -> nn.Linear:
    """A layer to try operators with, normal weights and bias, without torch's own random state."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(inputs, outputs, device="meta").requires_grad_(False)
    linear.to_empty(device="cpu")
    for parameter in linear.parameters():
        parameter.normal_(generator=generator)
    return linear


def _bias_bytes(linear: nn.Linear) -> int:
    return 0 if linear.bias is None else 4 * linear.out_features
