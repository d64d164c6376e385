"""The memory plan has the numbers, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from ktserve.config import Settings
from ktserve.models import memory
from ktserve.models.cpu_linear import Float32Linear, InvalidCpuWeights, choose
from ktserve.models.loading import InvalidModel, load
from ktserve.models.memory import InsufficientMemory, MemoryPlan, plan, plan_pool
from ktserve.models.source import resolve

CPU = torch.device("cpu")
PER_TOKEN = 2 * 3 * 2 * 16 * 4
"""Keys and values, layers, heads, head size, float32."""


def make_config(**changes: Any) -> PretrainedConfig:
    values: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1000,
        "tie_word_embeddings": True,
    }
    config = transformers.LlamaConfig(**(values | changes))
    config.architectures = ["LlamaForCausalLM"]
    return config


def make_plan(available_tokens: int, **settings: Any) -> MemoryPlan:
    """The plan with room for ``available_tokens`` beside weights of 5,000 bytes."""
    return plan_pool(
        make_config(),
        Settings(**settings),
        device=CPU,
        dtype=torch.float32,
        weight_bytes=5_000,
        available_bytes=5_000 + available_tokens * PER_TOKEN,
    )


def test_a_quarter_of_what_the_weights_leave() -> None:
    found = make_plan(8000)
    assert found.kv_bytes_per_token == PER_TOKEN
    assert (found.tokens, found.pages, found.page_size) == (2000, 2000, 1)
    assert found.pool_bytes == 2000 * PER_TOKEN
    assert (found.context_length, found.device, found.dtype) == (1000, "cpu", "float32")
    assert found.notes == ()


def test_the_fraction_and_the_page_size() -> None:
    found = make_plan(1001, mem_fraction_static=0.5, page_size=16)
    assert (found.tokens, found.pages) == (496, 31)
    assert "496 tokens at most" in found.notes[0]


def test_no_more_than_the_running_requests_can_use() -> None:
    found = make_plan(10**6, max_running_requests=2, context_length=300)
    assert found.tokens == 600
    assert "max_running_requests (2)" in found.notes[0]
    assert make_plan(10**6, max_running_requests=2, max_total_tokens=700).tokens == 700


def test_half_precision_halves_a_token() -> None:
    assert memory.kv_bytes_per_token(make_config(), torch.bfloat16) == PER_TOKEN // 2
    assert memory.kv_shape(make_config(num_key_value_heads=None, head_dim=32)) == (4, 32)


def test_too_little_memory_says_the_numbers() -> None:
    with pytest.raises(InsufficientMemory) as caught:
        make_plan(4 * 127)
    for part in ("127 tokens", "128 needed", f"{PER_TOKEN:,} bytes", "--mem-fraction-static"):
        assert part in str(caught.value)
    assert make_plan(4 * 128).tokens == 128
    assert make_plan(4 * 100, context_length=100).tokens == 100


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(InsufficientMemory, match="0 tokens"):
        make_plan(-3)


def test_max_total_tokens_must_fit() -> None:
    with pytest.raises(InsufficientMemory, match="--max-total-tokens to at most 500"):
        make_plan(500, max_total_tokens=501)
    assert make_plan(500, max_total_tokens=500).tokens == 500
    with pytest.raises(InsufficientMemory, match="raise --max-total-tokens"):
        make_plan(500, max_total_tokens=100)


def test_the_context_length_can_only_shrink() -> None:
    assert make_plan(8000, context_length=10).context_length == 10
    with pytest.raises(InvalidModel, match=r"context_length is 1001.*1000"):
        make_plan(8000, context_length=1001)


@pytest.mark.parametrize("cpu_weights", ["float16", "float32"])
def test_counted_weights_are_the_loaded_ones(tmp_path: Path, cpu_weights: Any) -> None:
    make_config().save_pretrained(tmp_path)
    settings = Settings(
        model=str(tmp_path), load_format="dummy", device="cpu", cpu_weights=cpu_weights
    )
    packing = choose(cpu_weights, torch.float32, CPU)
    loaded = load(
        resolve(settings.model, "dummy"), dtype=torch.float32, device=CPU, packing=packing
    )
    planned = plan(settings)
    assert planned.weight_bytes == loaded.weight_bytes
    assert planned.tokens > 0
    if packing is not None:
        assert planned.dtype == f"float32, weights {packing.label} (packed)"


def test_a_head_that_is_the_embedding_counts_once_until_it_is_packed() -> None:
    plain = memory.count_weight_bytes(make_config(), torch.float32)
    packed = memory.count_weight_bytes(make_config(), torch.float32, Float32Linear)
    assert packed - plain == 100 * 64 * 4
    untied = make_config(tie_word_embeddings=False)
    assert memory.count_weight_bytes(untied, torch.float32) == packed
    assert memory.count_weight_bytes(untied, torch.float32, Float32Linear) == packed


def test_packed_weights_are_for_float32_on_the_cpu(tmp_path: Path) -> None:
    make_config().save_pretrained(tmp_path)
    settings: dict[str, Any] = {
        "model": str(tmp_path),
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "bfloat16",
    }
    assert plan(Settings(**settings)).dtype == "bfloat16"
    with pytest.raises(InvalidCpuWeights, match=r"cpu_weights is float16.*leave --cpu-weights out"):
        plan(Settings(**settings, cpu_weights="float16"))


def test_a_gguf_file_is_planned_without_converting(tmp_path: Path) -> None:
    found = plan(Settings(cache_dir=str(tmp_path), device="cpu"))
    assert found.context_length == 8192
    assert found.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert found.weight_bytes >= 134_515_008 * 2
    plain = plan(Settings(cache_dir=str(tmp_path), device="cpu", dtype="bfloat16"))
    assert 134_515_008 * 2 <= plain.weight_bytes < 134_516_000 * 2
    assert list(tmp_path.iterdir()) == []


def test_an_untested_family_is_noted(tmp_path: Path) -> None:
    config = transformers.Olmo2Config(num_hidden_layers=1, hidden_size=64, vocab_size=100)
    config.architectures = ["Olmo2ForCausalLM"]
    config.save_pretrained(tmp_path)
    notes = plan(Settings(model=str(tmp_path), load_format="dummy", device="cpu")).notes
    assert any("Olmo2ForCausalLM is not among the families tested" in note for note in notes)


def test_a_container_limit_counts(tmp_path: Path) -> None:
    assert memory._cgroup_bytes_left(tmp_path) is None
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_bytes_left(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._cgroup_bytes_left(tmp_path) == 450


def test_cuda_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidModel, match=r"device is cuda.*--device cpu"):
        plan(Settings(load_format="dummy", device="cuda", model=None))
