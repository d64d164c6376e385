"""A model on its device, ready to run on pages."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig

from ktserve.models import architectures, dummy
from ktserve.models.cpu_linear import Packing, pack, weight_bytes_of
from ktserve.models.fusing import fuse
from ktserve.models.source import ModelSource, check_weights
from ktserve.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InvalidModel(ValueError):
    """The model or a setting about it cannot be used; the message names what and the remedy."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, without gradients.

    Attributes:
        model: call it with ``input_ids``, ``position_ids``, ``use_cache=False``,
            ``logits_to_keep`` and ``paged``.
        eos_token_ids: the ids that end a sequence, ascending.
        weight_bytes: bytes of its weights on the device, shared ones once.
        unpacked: names of linear layers that could not be packed as asked for.
    """

    model: transformers.PreTrainedModel
    config: PretrainedConfig
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    unpacked: tuple[str, ...] = ()


def load(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    fused: bool = True,
    packing: Packing | None = None,
    attention: str | None = None,
) -> LoadedModel:
    """Load ``source``, whose directory is set, onto ``device``.

    Args:
        seed: of random weights, for a dummy source.
        fused: merge sibling projections, see `ktserve.models.fusing`.
        packing: how linear layers are packed, see `ktserve.models.cpu_linear`; None leaves them.
        attention: the attention implementation; None is ktserve's own on pages.

    Raises:
        UnsupportedModel: the architecture cannot be served; no weight was read.
        InvalidModel: weights are missing or have other shapes than the config says.
    """
    directory = directory_of(source)
    config = read_config(directory)
    warning = architectures.check(config)
    if warning is not None:
        logger.warning("%s", warning)
    if attention is None:
        # Importing it registers an attention function, which only a loader needs.
        from ktserve.attention import ATTENTION_NAME, register

        register()
        attention = ATTENTION_NAME
    kind = architectures.model_class(config)
    if not source.dummy:
        check_weights(directory)
    if source.dummy:
        model = dummy.build(
            kind, config, seed=seed, dtype=dtype, device=device, attention=attention
        )
    else:
        model = _read_weights(kind, directory, config, dtype, device, attention)
    cast("nn.Module", model).eval()
    model.requires_grad_(False)
    if fused:
        fuse(model)
    unpacked: tuple[str, ...] = ()
    if packing is not None:
        unpacked = pack(model, packing)
        if unpacked:
            logger.warning(
                "linear layers stay float32, because their weights do not fit %s: %d (%s%s)",
                packing.label,
                len(unpacked),
                ", ".join(unpacked[:3]),
                ", ..." if len(unpacked) > 3 else "",
            )
    return LoadedModel(
        model, config, eos_token_ids(directory, config), weight_bytes_of(model), unpacked
    )


def read_config(directory: Path) -> PretrainedConfig:
    """The config of a model directory, checked by `architectures.check`.

    Raises:
        UnsupportedModel: the architecture cannot be served.
        InvalidModel: the config cannot be read.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise _unreadable(directory, error) from error
    architectures.check(config)
    return config


def choose_device(name: str) -> torch.device:
    """The device that the setting ``device`` means here.

    Raises:
        InvalidModel: CUDA is asked for, and torch sees none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        build = torch.version.cuda or "none: this is a CPU build of torch"
        raise InvalidModel(
            f"device is cuda, but torch sees no CUDA device (CUDA of its build: {build}); install"
            " a driver and a CUDA build of torch, or set --device cpu"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype that the setting ``dtype`` means for this model and device.

    "auto" is float32 on the CPU. On CUDA it is the checkpoint's, and bfloat16 where that is
    float32: tensor cores and fused attention take 16 bits, and few float32 checkpoints need more.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    stored = config.dtype
    return stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16


def choose_context_length(wanted: int | None, config: PretrainedConfig) -> int:
    """The most tokens of one sequence: the model's own limit, or less where asked for.

    Raises:
        InvalidModel: more is asked for than the model has positions.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        if wanted is None:
            raise InvalidModel(
                "the model's config has no max_position_embeddings; set --context-length"
            )
        return wanted
    if wanted is not None and wanted > limit:
        raise InvalidModel(
            f"context_length is {wanted}, but the model was trained for {limit} positions"
            " (max_position_embeddings) and its output beyond them is not meaningful; set"
            f" --context-length to at most {limit}"
        )
    return limit if wanted is None else wanted


def eos_token_ids(directory: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """The ids that end a sequence, by the generation config, the config and the tokenizer."""
    values: list[Any] = [config.eos_token_id]
    if (directory / "generation_config.json").is_file():
        values.append(
            GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
        )
    if (directory / "tokenizer.json").is_file():
        values.append(load_tokenizer(directory).eos_token_id)
    found: set[int] = set()
    for value in values:
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return tuple(sorted(found))


def directory_of(source: ModelSource) -> Path:
    if source.directory is None:
        raise AssertionError(f"{source.name} was located but not resolved")
    return source.directory


def _read_weights(
    kind: type[transformers.PreTrainedModel],
    directory: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
) -> transformers.PreTrainedModel:
    # A start's log is for operators: no bar of a step that takes a moment.
    console = cast("Any", transformers.logging)
    bars = console.is_progress_bar_enabled()
    console.disable_progress_bar()
    try:
        found = kind.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InvalidModel(
            f"the weights in {directory} cannot be read ({type(error).__name__}: {error});"
            " copy or download the model again"
        ) from error
    finally:
        if bars:
            console.enable_progress_bar()
    model, report = cast("tuple[transformers.PreTrainedModel, dict[str, Any]]", found)
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would go on with random values in their place.
        raise InvalidModel(
            f"the weights in {directory} lack {len(missing)} tensors of the model, for example"
            f" {missing[0]!r}; copy or download the model again"
        )
    cast("nn.Module", model).to(device)
    return model


def _unreadable(directory: Path, error: Exception) -> ValueError:
    """What to say about a config that transformers cannot read: mostly, a class it lacks."""
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reading:
        return InvalidModel(f"{path} cannot be read as JSON: {reading}")
    if not isinstance(content, dict):
        return InvalidModel(f"{path} is not a JSON object")
    names = content.get("architectures") or [content.get("model_type", "the model")]
    if "auto_map" in content:
        return architectures.UnsupportedModel(str(names[0]), architectures.REMOTE_CODE)
    model_type = content.get("model_type")
    if model_type not in CONFIG_MAPPING:
        why = f"transformers {transformers.__version__} has no model type {model_type!r}"
        return architectures.UnsupportedModel(str(names[0]), why)
    return InvalidModel(
        f"{path} (architecture {names[0]!r}) cannot be read by transformers"
        f" {transformers.__version__}: {type(error).__name__}: {error}"
    )
