"""A GGUF file becomes a Hugging Face directory: the same model, complete or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gguf as gguf_package
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ktserve.models import gguf
from ktserve.models.architectures import model_class
from ktserve.models.gguf_mapping import UnsupportedGguf
from ktserve.models.loading import load
from ktserve.models.source import ModelSource

Array = npt.NDArray[Any]

CONTROL, NORMAL = 3, 1
SPECIAL = ["<|start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "ĠĠ", "Ġ1", "12"]
MERGES = ["Ġ Ġ", "Ġ 1", "1 2"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SMALL: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
MODELS: dict[str, tuple[str, Callable[[], PretrainedConfig]]] = {
    "llama": (
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(
            **SMALL,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 50_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ),
    "qwen2": ("Qwen2ForCausalLM", lambda: transformers.Qwen2Config(**SMALL)),
    "qwen3": (
        "Qwen3ForCausalLM",
        lambda: transformers.Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
    ),
    "qwen3moe": (
        "Qwen3MoeForCausalLM",
        lambda: cast("Any", transformers.Qwen3MoeConfig)(
            **SMALL,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        lambda: transformers.Gemma3TextConfig(
            **(SMALL | {"num_hidden_layers": 6}),
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=4,
        ),
    ),
}
HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
GEMMA3 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def make_model(architecture: str) -> PreTrainedModel:
    name, make_config = MODELS[architecture]
    config = make_config()
    config.architectures = [name]
    torch.manual_seed(3)
    model = model_class(config)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.requires_grad_(False)


def permuted(values: Array, heads: int) -> Array:
    """llama.cpp's order of rotary pairs (``convert_hf_to_gguf.py``, ``permute``)."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def gguf_tensors(architecture: str, model: PreTrainedModel) -> dict[str, Array]:
    """What llama.cpp's converter writes for ``model``."""
    names = HF_TO_GGUF | (GEMMA3 if architecture == "gemma3" else {})
    config = model.config
    tensors: dict[str, Array] = {}
    for full_name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        name, prefix = full_name, ""
        if full_name.startswith("model.layers."):
            _, _, layer, name = full_name.split(".", 3)
            prefix = f"blk.{layer}."
        if name == "mlp.experts.gate_up_proj":
            gate, up = np.split(values, 2, axis=1)
            tensors[f"{prefix}ffn_gate_exps.weight"] = gate
            tensors[f"{prefix}ffn_up_exps.weight"] = up
            continue
        stem, _, kind = name.rpartition(".")
        if name == "mlp.experts.down_proj":
            stem, kind = name, "weight"
        if architecture == "llama" and stem == "self_attn.q_proj":
            values = permuted(values, config.num_attention_heads)
        if architecture == "llama" and stem == "self_attn.k_proj":
            values = permuted(values, config.num_key_value_heads)
        if architecture == "gemma3" and stem.endswith("norm"):
            values = values + np.float32(1)
        tensors[f"{prefix}{names[stem]}.{kind}"] = np.ascontiguousarray(values)
    if architecture == "llama":
        plain = 50_000.0 ** (-np.arange(0, 16, 2) / 16)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(
            np.float32
        )
    return tensors


def write_gguf(
    path: Path,
    architecture: str = "qwen2",
    *,
    quantized: bool = False,
    pre: str = "smollm",
    extra: dict[str, Array] | None = None,
    add_bos: bool = False,
) -> PreTrainedModel:
    """Write a small random model of ``architecture`` to ``path``, and return it."""
    model = make_model(architecture)
    config = model.config
    writer = gguf_package.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "llama":
        writer.add_rope_freq_base(50_000.0)
    elif architecture != "gemma3":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if "head_dim" in config.to_dict() and config.head_dim:
        writer.add_key_length(config.head_dim)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    for name, values in (gguf_tensors(architecture, model) | (extra or {})).items():
        if quantized and values.ndim == 2 and values.shape[-1] % 32 == 0:
            kind = gguf_package.GGMLQuantizationType.Q8_0
            packed = gguf_package.quants.quantize(values, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def converted(path: Path, target: Path) -> ModelSource:
    gguf.convert(path, target)
    return ModelSource("gguf", path.stem, target, path)


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_converted_model_has_the_same_logits(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    original = write_gguf(path, architecture)
    source = converted(path, tmp_path / "converted")
    loaded = load(source, dtype=torch.float32, device=torch.device("cpu"), attention="eager")
    ids = torch.randint(len(TOKENS), (1, 15), generator=torch.Generator().manual_seed(1))
    difference = loaded.model(input_ids=ids).logits - original(input_ids=ids).logits
    assert difference.abs().max().item() <= 1e-5
    assert loaded.config.max_position_embeddings == 128


def test_quantized_values_are_exactly_the_files(tmp_path: Path) -> None:
    path, target = tmp_path / "model.gguf", tmp_path / "converted"
    write_gguf(path, "qwen2", quantized=True)
    gguf.convert(path, target)
    (shard,) = target.glob("*.safetensors")
    weights = load_file(shard)
    packed = {tensor.name: tensor for tensor in gguf_package.GGUFReader(path).tensors}
    tensor = packed["blk.1.ffn_down.weight"]
    assert tensor.tensor_type == gguf_package.GGMLQuantizationType.Q8_0
    values = gguf_package.quants.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(weights["model.layers.1.mlp.down_proj.weight"], values)
    assert len(weights) == len(packed)


def test_shards_are_small_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "SHARD_BYTES", 20_000)
    path, target = tmp_path / "model.gguf", tmp_path / "converted"
    write_gguf(path)
    source = converted(path, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(target.glob("*.safetensors"))) > 2
    load(source, dtype=torch.float32, device=torch.device("cpu"), attention="eager")


def test_tokenizer_template_and_end_of_turn(tmp_path: Path) -> None:
    path, target = tmp_path / "model.gguf", tmp_path / "converted"
    write_gguf(path, add_bos=True)
    source = converted(path, target)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    # Digits stand alone before anything merges, so two spaces before one stay together.
    text = tokenizer.convert_ids_to_tokens(tokenizer("  12")["input_ids"])
    assert text == ["<|start|>", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("a<|im_end|>é  12")["input_ids"][1:]) == "a<|im_end|>é  12"
    assert tokenizer.chat_template == TEMPLATE
    loaded = load(source, dtype=torch.float32, device=torch.device("cpu"), attention="eager")
    assert loaded.eos_token_ids == (0, 1)


def test_unknown_split_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, pre="of-another-world")
    gguf.convert(path, tmp_path / "converted")
    assert "of-another-world" in caplog.text
    caplog.clear()
    write_gguf(path, pre="qwen2")
    gguf.convert(path, tmp_path / "known")
    assert "tokenizer.ggml.pre" not in caplog.text


_CONVERTER = """
import sys
from pathlib import Path
from typing import Any, cast
from ktserve.models import gguf

path, target, stop_at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
events = 0

def pause(*_):
    print("paused", flush=True)
    sys.stdin.readline()

def progress(done, total):
    global events
    events += 1
    if str(events) == stop_at or (stop_at == "end" and done == total):
        pause()

if stop_at == "rename":
    rename = Path.rename
    def late(self, other):
        if other == target:
            pause()
        return rename(self, other)
    Path.rename = late

print("started", flush=True)
gguf.convert(path, target, progress)
print("events", events, flush=True)
"""


def start_converter(path: Path, target: Path, stop_at: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _CONVERTER, str(path), str(target), stop_at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("moment", ["1", "9", "end", "rename"])
def test_a_kill_leaves_nothing_half(moment: str, tmp_path: Path) -> None:
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    target = cache / "converted"
    write_gguf(path)
    process = start_converter(path, target, moment)
    assert [next_line(process), next_line(process)] == ["started", "paused"]
    process.kill()
    process.communicate()
    assert not target.exists()
    assert list(cache.glob(".converted.tmp-*")), "the control: it was in the middle of something"
    source = converted(path, target)
    load(source, dtype=torch.float32, device=torch.device("cpu"), attention="eager")
    assert {entry.name for entry in cache.iterdir()} == {"converted", ".converted.lock"}


def test_two_starts_convert_once(tmp_path: Path) -> None:
    path, target = tmp_path / "model.gguf", tmp_path / "converted"
    write_gguf(path)
    first = start_converter(path, target, "1")
    assert [next_line(first), next_line(first)] == ["started", "paused"]
    second = start_converter(path, target, "never")
    assert next_line(second) == "started"
    assert not target.exists()
    outputs = [first.communicate("\n", timeout=60)[0], second.communicate(timeout=60)[0]]
    assert int(outputs[0].split()[1]) > 1
    assert outputs[1].split() == ["events", "0"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = tmp_path / "model.gguf", tmp_path / "cache" / "converted"
    write_gguf(path)

    def fail(done: int, _total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gguf.convert(path, target, fail)
    assert [entry.name for entry in target.parent.iterdir()] == [".converted.lock"]
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(OSError, match="--cache-dir"):
        gguf.convert(path, target)
    assert [entry.name for entry in target.parent.iterdir()] == [".converted.lock"]


def test_the_key_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a model;rm.gguf"
    path.write_bytes(b"GGUF one")
    first = gguf.cache_key(path)
    assert first == gguf.cache_key(path)
    assert first.startswith("a_model_rm-")
    path.write_bytes(b"GGUF two")
    assert gguf.cache_key(path) != first


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "attn_sinks"),
        ({"blk.0.ffn_up.bias": np.ones(4, np.float32)}, "ffn_up.bias"),
        ({"rope_freqs.weight": np.full(8, 3.0, np.float32)}, "Llama 3"),
    ],
)
def test_what_is_not_understood_is_refused(
    extra: dict[str, Array], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, extra=extra)
    with pytest.raises(UnsupportedGguf, match=message):
        gguf.convert(path, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf_package.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedGguf, match=r"'mamba'.*llama"):
        gguf.convert(path, tmp_path / "converted")


@pytest.mark.parametrize("keep", [0, 3, 60, 3000, -100])
def test_a_damaged_file_is_refused(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UnsupportedGguf, match=r"model\.gguf"):
        gguf.convert(path, tmp_path / "converted")
