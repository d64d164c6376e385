"""What the metadata and tensors of a GGUF file are called, and how they are laid out, in Hugging
Face's format.

For the architectures that ktserve is tested with; the layouts are those that llama.cpp's
``convert_hf_to_gguf.py`` writes. A key or tensor that would change the output and is not understood
here is refused, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Shapes = Mapping[str, tuple[int, ...]]

MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""GGUF architecture to transformers' model type and class. Mistral's files say ``llama``."""

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that is no weight: Llama 3.1's divisors of the rotary frequencies ``[head_dim / 2]``."""

_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"})
_CONTROL = 3

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_OF_GEMMA3 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")


class UnsupportedGguf(ValueError):
    """The file cannot be converted; the message says what in it is not supported."""


def config_dict(
    metadata: Mapping[str, Any], shapes: Shapes, rope_factors: Floats | None
) -> dict[str, Any]:
    """The content of ``config.json`` for a file with this metadata and these tensor shapes.

    Args:
        metadata: the file's keys; arrays of strings may be left as a count.
        shapes: of every tensor, outermost dimension first.
        rope_factors: the tensor named `ROPE_FACTORS`, where the file has it.

    Raises:
        UnsupportedGguf: the architecture, or a property of it, is not supported.
    """
    architecture = architecture_of(metadata)
    model_type, model_class = MODEL_TYPES[architecture]

    def optional(name: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{name}", default)

    def key(name: str) -> Any:
        value = optional(name)
        if value is None or isinstance(value, list):
            raise UnsupportedGguf(
                f"the GGUF file has {'no value' if value is None else 'one value a layer'} for"
                f" {architecture}.{name}; convert it again with a current llama.cpp"
            )
        return value

    if architecture == "llama" and optional("expert_count", 0):
        raise UnsupportedGguf("GGUF files of Mixtral (llama.expert_count) are not supported")
    heads, hidden = key("attention.head_count"), key("embedding_length")
    head_dim = optional("attention.key_length") or optional("rope.dimension_count")
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": optional("attention.head_count_kv", heads),
        "head_dim": head_dim or hidden // heads,
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": key("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    rope = _rope(optional, rope_factors, config["head_dim"])
    if architecture == "gemma3":
        config |= _gemma3(optional, key, config)
        local = {"rope_type": "default", "rope_theta": optional("rope.freq_base_swa", 10_000.0)}
        rope.setdefault("rope_theta", 1_000_000.0)
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    else:
        rope.setdefault("rope_theta", 10_000.0)
        config["rope_parameters"] = rope
    if architecture == "qwen3moe":
        config |= {
            "num_experts": key("expert_count"),
            "num_experts_per_tok": key("expert_used_count"),
            "moe_intermediate_size": key("expert_feed_forward_length"),
            "intermediate_size": optional("feed_forward_length", 0),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    else:
        config["intermediate_size"] = key("feed_forward_length")
    return config


def architecture_of(metadata: Mapping[str, Any]) -> str:
    """The file's architecture, one of `MODEL_TYPES`.

    Raises:
        UnsupportedGguf: it is another.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        raise UnsupportedGguf(
            f"GGUF files of architecture {architecture!r} are not supported; supported:"
            f" {', '.join(MODEL_TYPES)}. A directory in Hugging Face's format may still work"
        )
    return str(architecture)


def end_of_sequence_ids(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    """The ids that end a sequence: the declared ones, and the control tokens that end a turn."""
    declared = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    found = {int(token_id) for token_id in declared if token_id is not None}
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == _CONTROL and token in _END_OF_TURN:
            found.add(token_id)
    return sorted(found)


def tensor_sizes(architecture: str, shapes: Shapes) -> dict[str, int]:
    """Each GGUF tensor that becomes weights, and its size in values.

    Raises:
        UnsupportedGguf: a tensor has no place in this architecture.
    """
    sizes = {}
    for name, shape in shapes.items():
        if name == ROPE_FACTORS:
            continue
        if not _is_known(architecture, name):
            raise UnsupportedGguf(
                f"the GGUF tensor {name!r} has no place in the architecture {architecture}"
            )
        sizes[name] = int(np.prod(shape))
    return sizes


def hugging_face_tensors(
    architecture: str, config: Mapping[str, Any], name: str, values: Floats
) -> Iterator[tuple[str, Floats]]:
    """The Hugging Face tensors, name and values, that one dequantized GGUF tensor holds.

    Args:
        name: one of `tensor_sizes`.
        values: outermost dimension first.
    """
    if name in _WHOLE_MODEL:
        offset = architecture == "gemma3" and name == "output_norm.weight"
        yield _WHOLE_MODEL[name], values - np.float32(1) if offset else values
        return
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        raise AssertionError(f"{name} was not checked by tensor_sizes")
    layer, part, kind = match.groups()
    prefix = f"model.layers.{layer}"
    if part in _EXPERTS:
        for expert, weight in enumerate(values):
            yield f"{prefix}.mlp.experts.{expert}.{_EXPERTS[part]}.{kind}", weight
        return
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        values = _halves_together(values, heads)
    if architecture == "gemma3" and part.endswith("norm"):
        # llama.cpp stores gemma's norm weights as they multiply; transformers adds 1 in the model.
        values = values - np.float32(1)
    yield f"{prefix}.{_names(architecture)[part]}.{kind}", values


def _names(architecture: str) -> dict[str, str]:
    if architecture == "gemma3":
        return _LAYER | _LAYER_OF_GEMMA3
    return _LAYER | _ROUTER if architecture == "qwen3moe" else _LAYER


def _is_known(architecture: str, name: str) -> bool:
    if name in _WHOLE_MODEL:
        return True
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return False
    _, part, kind = match.groups()
    if kind == "bias":
        return architecture == "qwen2" and part in ("attn_q", "attn_k", "attn_v")
    return part in _names(architecture) or (architecture == "qwen3moe" and part in _EXPERTS)


def _halves_together(values: Floats, heads: int) -> Floats:
    """Undo llama.cpp's order of rotary pairs: neighbours (0, 1), (2, 3) become (0, d/2), (1, ...).

    ``convert_hf_to_gguf.py``, ``LlamaModel.permute``, backwards.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _gemma3(
    optional: Callable[..., Any], key: Callable[[str], Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    # llama.cpp knows the 27B by its depth too: alone it scales by hidden size over heads.
    largest = layers == 62
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": key("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention"
            for layer in range(layers)
        ],
        "query_pre_attn_scalar": per_head if largest else config["head_dim"],
        "final_logit_softcapping": optional("final_logit_softcapping"),
    }


def _rope(optional: Callable[..., Any], factors: Floats | None, head_dim: int) -> dict[str, Any]:
    theta = optional("rope.freq_base")
    rope: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    kind = optional("rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            raise UnsupportedGguf(f"rope scaling {kind!r} together with {ROPE_FACTORS}")
        return rope | _llama3_scaling(factors, theta or 10_000.0, head_dim)
    if kind == "none":
        return rope | {"rope_type": "default"}
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": optional("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        return rope | {
            "rope_type": "yarn",
            "factor": optional("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": optional("rope.scaling.original_context_length"),
        }
    raise UnsupportedGguf(f"rope scaling {kind!r} in a GGUF file; supported: linear, yarn")


def _llama3_scaling(factors: Floats, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's rope parameters, proved by giving the file's own divisors again."""
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max())
    turns = original / (2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedGguf(f"{ROPE_FACTORS} does not hold Llama 3's rotary divisors")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
