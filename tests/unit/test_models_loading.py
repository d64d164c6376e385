"""Loading: what it gives, and what it refuses to go on with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from ktserve.models.architectures import UnsupportedModel
from ktserve.models.cpu_linear import Float16Linear, choose
from ktserve.models.loading import InvalidModel, LoadedModel, choose_dtype, load, read_config
from ktserve.models.source import resolve
from ktserve.models.tokenizer import InvalidTokenizer, load_tokenizer

CPU = torch.device("cpu")


def make_config(**changes: Any) -> PretrainedConfig:
    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 100,
        "eos_token_id": 3,
    }
    return transformers.LlamaConfig(**(values | changes))


def make_checkpoint(directory: Path, **changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(make_config(**changes)).eval().requires_grad_(False)
    model.save_pretrained(directory)
    return model


def load_from(directory: Path, load_format: Any = "auto", **options: Any) -> LoadedModel:
    arguments = {"dtype": torch.float32, "device": CPU, "attention": "eager"} | options
    return load(resolve(str(directory), load_format), **arguments)


def test_a_checkpoint_gives_its_own_logits(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path)
    loaded = load_from(tmp_path)
    ids = torch.arange(10)[None]
    difference = loaded.model(input_ids=ids).logits - original(input_ids=ids).logits
    assert difference.abs().max().item() <= 1e-5
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    weights = sum(p.numel() for p in original.parameters())
    assert 0 <= loaded.weight_bytes - 4 * weights <= 1024


def test_layers_that_float16_cannot_hold_stay_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if choose("auto", torch.float32, CPU) is not Float16Linear:
        pytest.skip("no packed float16 weights here")
    original = make_checkpoint(tmp_path)
    ids = torch.arange(10)[None]
    assert load_from(tmp_path, packing=Float16Linear).unpacked == ()
    assert "stay float32" not in caplog.text, "the control"
    original.model.layers[1].mlp.down_proj.weight[0] *= 1e-6
    original.save_pretrained(tmp_path)
    loaded = load_from(tmp_path, packing=Float16Linear)
    assert loaded.unpacked == ("model.layers.1.mlp.down_proj",)
    assert (
        "stay float32, because their weights do not fit float16: 1 (model.layers.1" in caplog.text
    )
    difference = loaded.model(input_ids=ids).logits - original(input_ids=ids).logits
    assert 0 < difference.abs().max().item() <= 2e-3


def test_own_attention_is_the_default(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    assert load_from(tmp_path, attention=None).model.config._attn_implementation == "ktserve_paged"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_count_once(tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=tied)
    model = load_from(tmp_path).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(InvalidModel, match=r"lack 1 tensors.*layers\.1\.mlp\.up_proj"):
        load_from(tmp_path)


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InvalidModel, match="cannot be read"):
        load_from(tmp_path)


def test_weights_of_another_shape_are_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    make_config(intermediate_size=52).save_pretrained(tmp_path)
    with pytest.raises(InvalidModel):
        load_from(tmp_path)


def test_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    config = transformers.MambaConfig(num_hidden_layers=1)
    config.architectures = ["MambaForCausalLM"]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        load_from(tmp_path)


def test_code_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    content = {
        "architectures": ["MyForCausalLM"],
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.MyConfig"},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=r"MyForCausalLM.*auto_map"):
        read_config(tmp_path)
    del content["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=r"MyForCausalLM.*no model type 'mine'"):
        read_config(tmp_path)


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidModel, match=r"config\.json"):
        read_config(tmp_path)


def test_eos_ids_of_every_source(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert load_from(tmp_path).eos_token_ids == (3, 5, 7)


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    make_config().save_pretrained(tmp_path)
    before = torch.random.get_rng_state()
    models = [load_from(tmp_path, "dummy", seed=seed).model for seed in (1, 1, 2)]
    assert torch.equal(before, torch.random.get_rng_state())
    first, again, other = ([p.clone() for p in model.parameters()] for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    logits = models[0](input_ids=torch.arange(20)[None]).logits
    assert logits.isfinite().all()
    assert logits.std().item() > 0


@pytest.mark.parametrize(
    ("name", "stored", "device", "chosen"),
    [
        ("auto", torch.bfloat16, "cpu", torch.float32),
        ("auto", torch.float16, "cuda", torch.float16),
        ("auto", torch.float32, "cuda", torch.bfloat16),
        ("float32", torch.bfloat16, "cuda", torch.float32),
        ("bfloat16", torch.float32, "cpu", torch.bfloat16),
    ],
)
def test_dtype(name: str, stored: torch.dtype, device: str, chosen: torch.dtype) -> None:
    assert choose_dtype(name, make_config(dtype=stored), torch.device(device)) == chosen


@pytest.fixture(scope="module")
def packaged_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model's config and tokenizer, without its weights."""
    directory = resolve(None, "dummy", None, tmp_path_factory.mktemp("cache")).directory
    assert directory is not None
    return directory


def test_the_tokenizer_does_not_import_torch(packaged_config: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ktserve.models.tokenizer import load_tokenizer;"
        "t = load_tokenizer(Path(sys.argv[1])); assert t.chat_template;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(packaged_config)], check=True)


def test_a_chat_template_from_a_file(packaged_config: Path, tmp_path: Path) -> None:
    own = load_tokenizer(packaged_config).chat_template
    assert "<|im_start|>" in own
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_tokenizer(packaged_config, path)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi!"
    with pytest.raises(InvalidTokenizer, match="chat_template"):
        load_tokenizer(packaged_config, tmp_path / "missing.jinja")


def test_a_missing_or_damaged_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_the_packaged_model_answers(tmp_path: Path) -> None:
    import gguf

    source = resolve(None, "auto", None, tmp_path)
    assert source.directory is not None
    assert source.gguf is not None
    loaded = load(source, dtype=torch.float32, device=CPU, attention="sdpa")
    embeddings = next(
        tensor
        for tensor in gguf.GGUFReader(source.gguf).tensors
        if tensor.name == "token_embd.weight"
    )
    np.testing.assert_array_equal(
        loaded.model.model.embed_tokens.weight.numpy(),
        gguf.quants.dequantize(embeddings.data, embeddings.tensor_type),
    )
    tokenizer = load_tokenizer(source.directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = loaded.model.generate(**prompt, max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
    assert loaded.eos_token_ids == (2,)
