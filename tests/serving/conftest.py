"""Servers for the tests of this folder."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import CACHE, TENANTS, Server

from ktserve.models.source import locate


@pytest.fixture(scope="session")
def packaged() -> Iterator[Server]:
    """The packaged model for two tenants; shared, so tests use prompts of their own.

    Its weights are float32, as those of transformers are, with which its text is compared.
    """
    with tempfile.TemporaryDirectory() as directory:
        tenants = Path(directory, "tenants.toml")
        tenants.write_text(TENANTS)
        server = Server(
            *("--tenants", str(tenants), "--enable-metrics", "--log-level", "debug"),
            *("--cpu-weights", "float32"),
        )
        try:
            yield server.wait_ready()
        finally:
            server.stop()


@pytest.fixture(scope="session")
def packaged_directory(packaged: Server) -> Path:  # noqa: ARG001 (its start converts the model)
    """The packaged model in Hugging Face's format."""
    directory = locate(None, "auto", CACHE).directory
    assert directory is not None
    return directory


@pytest.fixture(scope="session")
def small_model(packaged_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a model of a few layers with the packaged tokenizer, for ``dummy`` weights."""
    directory = tmp_path_factory.mktemp("small")
    for file in packaged_directory.glob("*token*"):
        shutil.copy(file, directory)
    if (packaged_directory / "chat_template.jinja").exists():
        shutil.copy(packaged_directory / "chat_template.jinja", directory)
    config = json.loads((packaged_directory / "config.json").read_text())
    config.update(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def serve(small_model: Path) -> Iterator[Callable[..., Server]]:
    """Start servers of the small model; they are stopped after the test."""
    servers: list[Server] = []

    def start(*arguments: str) -> Server:
        server = Server(
            *(str(small_model), "--load-format", "dummy", "--random-seed", "1"),
            *("--served-model-name", "small", "--cpu-threads", "1", "--enable-metrics"),
            *arguments,
        )
        servers.append(server)
        return server.wait_ready()

    yield start
    for server in servers:
        server.stop()
