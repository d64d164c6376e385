"""What can be served is known from the config, and a refusal says why."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig

from ktserve.models.architectures import UnsupportedModel, check


def make_config(name: str = "LlamaForCausalLM", **changes: Any) -> PretrainedConfig:
    config = transformers.LlamaConfig(num_hidden_layers=2)
    config.architectures = [name]
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def named(config: PretrainedConfig, name: str) -> PretrainedConfig:
    config.architectures = [name]
    return config


def test_a_tested_family_is_accepted() -> None:
    assert check(make_config()) is None


def test_another_decoder_is_accepted_with_a_warning() -> None:
    warning = check(named(transformers.Olmo2Config(), "Olmo2ForCausalLM"))
    assert warning is not None
    assert warning.startswith("Olmo2ForCausalLM is not among the families tested")


REFUSED = {
    "encoder-decoder": (named(transformers.T5Config(), "T5ForConditionalGeneration"), "encoder-"),
    "recurrent": (named(transformers.MambaConfig(), "MambaForCausalLM"), "recurrent state"),
    "hybrid": (named(transformers.Qwen3NextConfig(), "Qwen3NextForCausalLM"), "recurrent state"),
    "linear attention": (
        make_config(layer_types=["full_attention", "linear_attention"]),
        "linear_attention",
    ),
    "chunked attention": (
        make_config(layer_types=["chunked_attention", "full_attention"]),
        "chunked_attention",
    ),
    "multimodal": (
        named(transformers.Gemma3Config(), "Gemma3ForConditionalGeneration"),
        "saved as Gemma3ForCausalLM",
    ),
    "dynamic rope": (
        make_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "'dynamic'",
    ),
    "longrope": (make_config(rope_parameters={"rope_type": "longrope"}), "'longrope'"),
    "rope of one layer type": (
        make_config(rope_parameters={"full_attention": {"rope_type": "dynamic"}}),
        "'dynamic'",
    ),
    "remote code": (
        make_config("MyForCausalLM", auto_map={"AutoModelForCausalLM": "my.MyForCausalLM"}),
        "auto_map",
    ),
    "unknown class": (make_config("MyForCausalLM"), "no class of that name"),
    "not causal": (named(transformers.BertConfig(), "BertForMaskedLM"), "not a causal"),
    "encoder as decoder": (named(transformers.BertConfig(), "BertLMHeadModel"), "later tokens"),
    "fixed attention": (named(transformers.BloomConfig(), "BloomForCausalLM"), "be replaced"),
    "sinks": (named(transformers.GptOssConfig(), "GptOssForCausalLM"), "sinks"),
    "latent attention": (
        named(transformers.DeepseekV3Config(), "DeepseekV3ForCausalLM"),
        "latent attention",
    ),
    "bidirectional": (
        named(transformers.Gemma3TextConfig(use_bidirectional_attention=True), "Gemma3ForCausalLM"),
        "later tokens",
    ),
    "quantized": (make_config(quantization_config={"quant_method": "awq"}), "'awq'"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_be_served_is_refused_by_name(case: str) -> None:
    config, reason = REFUSED[case]
    assert config.architectures
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        check(config)
    assert str(caught.value).startswith(config.architectures[0] + " cannot be served")


def test_static_rope_scaling_is_accepted() -> None:
    for kind in ("linear", "yarn", "llama3"):
        assert check(make_config(rope_parameters={"rope_type": kind, "factor": 2.0})) is None
