"""How an engine starts: what is refused, and before what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from ktserve.config import Settings
from ktserve.engine.process import start
from ktserve.models.architectures import UnsupportedModel
from ktserve.models.loading import InvalidModel
from ktserve.tenancy.tenants import load_roster

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}


def started(settings: Settings) -> None:
    start(settings, b"key", load_roster(settings))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[list[str]]]:
    """A hub model's directory, and the file patterns of each download from it."""
    asked: list[list[str]] = []

    def download(_name: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return tmp_path, asked


@pytest.mark.parametrize(
    ("config", "settings", "error"),
    [
        (LLAMA | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, {}, None),
        (LLAMA | {"architectures": ["FooForCausalLM"], "model_type": "foo"}, {}, None),
        (LLAMA, {"context_length": 512}, InvalidModel),
    ],
)
def test_no_weight_is_downloaded_that_cannot_be_served(hub, config, settings, error):
    directory, asked = hub
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(error or UnsupportedModel) as refused:
        started(Settings(model="org/name", device="cpu", **settings))
    if error is None:
        assert config["architectures"][0] in str(refused.value)
        assert "pip install" not in str(refused.value)
    assert len(asked) == 1
    assert "*.safetensors" not in asked[0]


def test_a_model_that_can_be_served_is_then_downloaded(hub):
    directory, asked = hub
    (directory / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        started(Settings(model="org/name", device="cpu"))
    assert [any("safetensors" in pattern for pattern in one) for one in asked] == [False, True]


def test_an_architecture_is_refused_before_its_missing_weights_are(tmp_path):
    config = LLAMA | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        started(Settings(model=str(tmp_path), device="cpu"))
