"""`ktserve run --dry-run`: what a server would run with, or why it could not start."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from ktserve.cli import main as cli
from ktserve.cli.exit_codes import ExitCode
from ktserve.config import Settings
from ktserve.engine.effective import effective_settings
from ktserve.engine.limits import CPU_PREFILL_TOKENS, CUDA_PREFILL_TOKENS, scheduler_limits
from ktserve.models import memory, packaged
from ktserve.models.tokenizer import InvalidTokenizer


def dry_run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["run", "--dry-run", "--device", "cpu", *arguments])


def shown(*arguments: str) -> dict[str, list[str]]:
    """Value and origin of each setting by name."""
    result = dry_run(*arguments)
    assert result.exit_code == ExitCode.GOOD, result.stderr
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def refused(*arguments: str) -> str:
    """The problem that a dry run ends with, and nothing before it."""
    result = dry_run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    return result.stderr


def test_what_is_left_to_the_machine_and_the_model_is_shown_as_it_would_be(tmp_path: Path) -> None:
    found = shown("--cache-dir", str(tmp_path), "--name", "n", "--max-running-requests", "8")
    assert found["max_running_requests"] == ["8", "--max-running-requests"]
    assert found["chunked_prefill_size"] == [f"{CPU_PREFILL_TOKENS} (auto)", "default"]
    assert found["max_num_batched_tokens"] == [f"{CPU_PREFILL_TOKENS + 8} (auto)", "default"]
    assert found["context_length"] == ["8192 (auto)", "default"]
    assert found["served_model_name"] == ["SmolLM2-135M-Instruct (auto)", "default"]
    assert found["load_format"] == ["gguf (auto)", "default"]
    assert found["dtype"] == ["float32 (auto)", "default"]
    assert found["device"] == ["cpu", "--device"]
    assert found["attention_backend"] == ["torch (auto)", "default"]
    assert found["mem_fraction_static"] == ["0.25 (auto)", "default"]
    assert found["cpu_threads"] == [f"{torch.get_num_threads()} (auto)", "default"]
    assert found["runtime_dir"][0].endswith("/n (auto)")
    assert found["cache_dir"] == [str(tmp_path), "--cache-dir"]
    assert int(found["max_total_tokens"][0].removesuffix(" (auto)")) > 128
    assert not {"auto", ""} & {value for value, _ in found.values()}


def test_what_was_given_is_not_called_automatic() -> None:
    given = {
        "--max-total-tokens": "4096",
        "--context-length": "1024",
        "--dtype": "bfloat16",
        "--cpu-threads": "1",
        "--mem-fraction-static": "0.5",
        "--chunked-prefill-size": "64",
        "--max-num-batched-tokens": "128",
        "--served-model-name": "m",
    }
    found = shown(*(word for pair in given.items() for word in pair))
    for flag, value in given.items():
        assert found[flag.removeprefix("--").replace("-", "_")] == [value, flag]


def test_whole_prompts_are_as_long_as_the_context() -> None:
    settings = Settings(chunked_prefill_size=-1, context_length=1024, device="cpu")
    effective = effective_settings(settings, memory.plan(settings))
    assert effective.chunked_prefill_size == 1024
    assert effective.max_num_batched_tokens == 1024 + 32
    assert effective.dtype == "float32"
    assert effective.api_key is None


def test_a_steps_prompt_tokens_are_those_of_the_device() -> None:
    for device, tokens in (("cpu", CPU_PREFILL_TOKENS), ("cuda", CUDA_PREFILL_TOKENS)):
        limits = scheduler_limits(Settings(), 8192, device)
        assert (limits.prefill_tokens, limits.max_batched_tokens) == (tokens, tokens + 32)


def test_the_argument_is_shown_as_the_origin_of_the_model() -> None:
    path = str(packaged.find())
    assert shown(path)["model"] == [path, "MODEL"]
    assert shown("--model", path)["model"] == [path, "--model-path"]


def test_of_a_wrong_model_only_the_problem_is_shown(tmp_path: Path) -> None:
    refusal = refused(str(tmp_path / "absent"))
    assert refusal.startswith("ktserve run: model ")
    assert refusal.count("\n") == 1
    (tmp_path / "config.json").write_text("{}")
    assert "model" in refused(str(tmp_path))


def test_a_file_that_the_server_could_not_use_fails_the_dry_run(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("[[")
    assert "broken" in refused("--tenants", str(broken))
    broken.write_text("[one]\n[two]\n")
    assert refused("--tenants", str(broken)).count("ktserve run: ") == 2
    assert "--ssl-certfile" in refused("--ssl-certfile", str(broken))


def test_each_tenants_part_of_the_pool_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    key = "sha256:" + "0" * 64
    file.write_text(
        f"[tenants.a]\nweight = 3\nkeys = ['{key}']\n"
        "[tenants.b]\nkeys = []\ncache_cap = 0.5\n"
        "[[public]]\nname = 'p'\ntenants = ['a']\ntext = 'x'\n"
    )
    pool = ("--tenants", str(file), "--max-total-tokens", "10000", "--context-length", "1000")
    for sharing, a, b in (
        # A tenth is set aside for the public prefix.
        ("floors", ("3,375", "9,000", "7,875"), ("1,125", "4,500", "4,500")),
        ("partitioned", ("6,750",) * 3, ("2,250",) * 3),
        ("shared", ("0", "9,000", "9,000"), ("0", "4,500", "4,500")),
    ):
        rows = dry_run(*pool, "--cache-sharing", sharing).stdout.splitlines()
        assert "\t".join(("a", *a)) in rows
        assert "\t".join(("b", *b)) in rows
    file.write_text(file.read_text().replace("weight = 3", "weight = 1000000"))
    refusal = refused(*pool, "--cache-sharing", "partitioned")
    assert "tenant b gets none of the 9000 pages" in refusal


def test_a_runtime_directory_whose_path_is_too_long_fails_the_dry_run() -> None:
    too_long = Path(tempfile.gettempdir(), "x" * 120)
    assert "too long" in refused("--runtime-dir", str(too_long))


def test_a_model_directory_that_lacks_its_weights_or_tokenizer_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=16,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    model = str(tmp_path)
    assert "no *.safetensors" in refused(model)
    assert "revision" in refused(model, "--revision", "x", "--load-format", "dummy")
    settings = Settings(model=model, load_format="dummy", device="cpu")
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json"):
        effective_settings(settings, memory.plan(settings))
