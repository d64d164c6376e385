"""Which models can be served, decided from the config alone, before any weight is read."""

from __future__ import annotations

import inspect
from typing import Any, cast

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

PROVEN = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
        "Gemma3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Served with transformers' own logits: see ``tests/unit/test_families.py``."""

REMOTE_CODE = "its code is in the checkpoint (auto_map); code from a checkpoint is never run"

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ROPE_TYPES_OF_A_BATCH = ("dynamic", "longrope")
_ATTENTION_SINKS = frozenset(
    {"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "deepseek_v4", "hy_v4", "flint"}
)
_FORWARD_PARAMETERS = frozenset({"input_ids", "position_ids", "logits_to_keep"})


class UnsupportedModel(ValueError):
    """A model that cannot be served.

    Attributes:
        architecture: its class's name as the config gives it.
        why: the reason, and what would work instead where something would.
    """

    def __init__(self, architecture: str, why: str) -> None:
        super().__init__(f"{architecture} cannot be served: {why}")
        self.architecture = architecture
        self.why = why


def architecture_of(config: PretrainedConfig) -> str:
    """The model class's name: the config's own, or the one of its model type."""
    architectures = config.architectures or []
    if architectures:
        return str(architectures[0])
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return str(name) if name is not None else config.model_type


def check(config: PretrainedConfig) -> str | None:
    """Refuse a model that would not run, or would run wrongly.

    Returns:
        None for a family that is tested, else a warning for people.

    Raises:
        UnsupportedModel: it cannot be served; says why.
    """
    name = architecture_of(config)
    why = (
        _why_other_kind(config, name)
        or _why_weights(config)
        or _why_attention(config)
        or _why_rope(config)
    )
    if why is not None:
        raise UnsupportedModel(name, why)
    if name in PROVEN:
        return None
    return (
        f"{name} is not among the families tested ({', '.join(sorted(PROVEN))}); it runs"
        " transformers' own code on paged attention, but nobody has compared its output"
    )


def model_class(config: PretrainedConfig) -> type[transformers.PreTrainedModel]:
    """The transformers class of a config that `check` accepts."""
    found = _class_named(architecture_of(config))
    if found is None:
        raise UnsupportedModel(architecture_of(config), "transformers has no such class")
    return found


def _class_named(name: str) -> type[transformers.PreTrainedModel] | None:
    found = getattr(transformers, name, None)
    is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
    return cast("type[transformers.PreTrainedModel]", found) if is_model else None


def _why_other_kind(config: PretrainedConfig, name: str) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; only decoder-only text models are"
    text = getattr(config, "text_config", None)
    if text is not None:
        alone = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(text, "model_type", ""))
        works = f"; its text part alone, saved as {alone}, may be" if alone else ""
        return f"it is a multimodal wrapper around a text model{works}"
    found = _class_named(name)
    if found is None:
        if getattr(config, "auto_map", None):
            return REMOTE_CODE
        return f"transformers {transformers.__version__} has no class of that name"
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "it is not a causal language model"
    if getattr(found, "_is_stateful", False):
        return "its layers carry a recurrent state, which pages of keys and values cannot hold"
    parameters = inspect.signature(found.forward).parameters
    takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if (
        not getattr(found, "_supports_attention_backend", False)
        or not takes_more
        or not parameters.keys() >= _FORWARD_PARAMETERS
    ):
        return "its transformers class does not let attention be replaced"
    return None


def _why_weights(config: PretrainedConfig) -> str | None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, dict)
        else getattr(quantization, "quant_method", None)
    )
    return (
        f"its weights are quantized ({str(method)[:40]!r}), which this version does not read;"
        " use a float checkpoint or a .gguf file of the model"
    )


def _why_attention(config: PretrainedConfig) -> str | None:
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if others:
        return f"it has layers of type {', '.join(others)}; only full and sliding attention are"
    if config.model_type in _ATTENTION_SINKS:
        return "its attention has sinks, which paged attention does not compute"
    if getattr(config, "use_bidirectional_attention", False) or (
        config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    ):
        return "its attention looks at later tokens, so a prefix could not be reused"
    if getattr(config, "kv_lora_rank", None):
        return "its multi-head latent attention keeps keys and values of different sizes"
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "global_head_dim", None):
        return "its layers share or differ in the size of their keys and values"
    if getattr(config, "alibi", False):
        return "its attention has ALiBi biases, which paged attention does not compute"
    return None


def _why_rope(config: PretrainedConfig) -> str | None:
    found: Any = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    sets = [found, *(value for value in found.values() if isinstance(value, dict))]
    for parameters in sets:
        kind = str(parameters.get("rope_type", parameters.get("type", "default")))
        if any(word in kind for word in _ROPE_TYPES_OF_A_BATCH):
            return (
                f"its rotary embedding is of type {kind!r}, whose frequencies follow the longest"
                " sequence of a batch: one request's length would change another's output"
            )
    return None
