"""A GGUF file converted, once, to a directory in Hugging Face's format.

Weights are dequantized to float32 by the ``gguf`` package, tensor by tensor, so that every value is
exactly the file's. The directory appears under its name complete and synced to disk, or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ktserve.models import gguf_mapping
from ktserve.models.gguf_mapping import Floats, UnsupportedGguf
from ktserve.models.progress import Progress, silent

LAYOUT_VERSION = 1
"""Part of a converted directory's name: raise it when the conversion changes."""

SHARD_BYTES = 1 << 30
_HEAD_BYTES = 1 << 20
_DISK_RESERVE = 64 << 20


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says before its weights.

    Attributes:
        metadata: its keys; arrays of strings are left as their length.
        shapes: of each tensor, outermost dimension first.
    """

    path: Path
    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def architecture(self) -> str:
        return gguf_mapping.architecture_of(self.metadata)

    def config(self) -> dict[str, Any]:
        """The content of the model's ``config.json``."""
        factors = None
        if gguf_mapping.ROPE_FACTORS in self.shapes:
            factors = next(_tensors(self.path, {gguf_mapping.ROPE_FACTORS}))[1]
        return gguf_mapping.config_dict(self.metadata, self.shapes, factors)


def cache_key(path: Path) -> str:
    """A name for the file's present content: its size, time of change and a digest of its head."""
    stat = path.stat()
    digest = hashlib.sha256(f"{LAYOUT_VERSION}:{stat.st_size}:{stat.st_mtime_ns}:".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem).lstrip(".")[:80]
    return f"{stem}-{digest.hexdigest()[:16]}"


def read_header(path: Path) -> GgufHeader:
    """The metadata and tensor shapes of ``path``, without its weights.

    Raises:
        UnsupportedGguf: it is no GGUF file, or ends inside its header.
    """
    from transformers.integrations.gguf.reader import GgufHeader as Tensors
    from transformers.integrations.gguf.reader import read_gguf_metadata

    try:
        metadata, _ = read_gguf_metadata(str(path))
        header = Tensors.from_file(str(path))
    except (ValueError, IndexError, struct.error) as error:
        raise UnsupportedGguf(f"{path} cannot be read as a GGUF file: {error}") from error
    end = max((header.data_start + info.offset + info.nbytes for info in header.tensors), default=0)
    if not header.tensors or end > path.stat().st_size:
        raise UnsupportedGguf(f"{path} ends before its weights do: copy or download it again")
    return GgufHeader(path, metadata, {info.name: info.shape for info in header.tensors})


def convert(gguf: Path, target: Path, progress: Progress = silent, *, weights: bool = True) -> None:
    """Make ``target`` the converted form of ``gguf``, unless it is there already.

    A second process that wants the same target waits for the first. A kill at any moment leaves no
    target, and a temporary directory beside it that the next call removes.

    Args:
        target: a directory that does not exist, or that an earlier call completed.
        progress: told (values written, values in all).
        weights: False writes the config and tokenizer alone.

    Raises:
        UnsupportedGguf: the file cannot be converted.
        OSError: the disk is full or not writable.
    """
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if target.is_dir():
            return
        for leftover in target.parent.glob(f".{target.name}.tmp-*"):
            shutil.rmtree(leftover)
        header = read_header(gguf)
        # All that can be refused is refused before anything is written.
        config = header.config()
        sizes = gguf_mapping.tensor_sizes(header.architecture, header.shapes)
        if weights:
            _check_space(target.parent, 4 * sum(sizes.values()))
        directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        try:
            _write_json(directory / "config.json", config)
            _write_tokenizer(header, directory, config)
            if weights:
                _write_weights(header, config, sizes, directory, progress)
            for path in directory.iterdir():
                _sync(path)
            _sync(directory)
            directory.rename(target)
            _sync(target.parent)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


def _write_weights(
    header: GgufHeader,
    config: dict[str, Any],
    sizes: dict[str, int],
    directory: Path,
    progress: Progress,
) -> None:
    """Stream the weights into shards of about `SHARD_BYTES`, so that one shard is in memory."""
    from safetensors.numpy import save_file

    total, done = sum(sizes.values()), 0
    shards: list[list[str]] = []
    shard: dict[str, Floats] = {}

    def flush() -> None:
        save_file(shard, directory / f"shard-{len(shards)}.safetensors", {"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    progress(0, total)
    for name, values in _tensors(header.path, set(sizes)):
        shard.update(gguf_mapping.hugging_face_tensors(header.architecture, config, name, values))
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            flush()
        done += sizes[name]
        progress(done, total)
    if shard:
        flush()
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file_name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{index}.safetensors").rename(directory / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": 4 * total}, "weight_map": weight_map},
    )


def _tensors(path: Path, names: set[str]) -> Iterator[tuple[str, Floats]]:
    """The named tensors as float32, in the file's order, each read when asked for."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize
    from transformers.integrations.gguf.reader import GgufHeader as Tensors

    header = Tensors.from_file(str(path))
    data = np.memmap(path, mode="r", dtype=np.uint8)
    for info in header.tensors:
        if info.name not in names:
            continue
        start = header.data_start + info.offset
        rows = data[start : start + info.nbytes].reshape(*info.shape[:-1], -1)
        values = dequantize(rows, GGMLQuantizationType(info.ggml_type))
        yield info.name, np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)


def _write_tokenizer(header: GgufHeader, directory: Path, config: dict[str, Any]) -> None:
    """Write the tokenizer, its chat template, and the generation config."""
    from ktserve.models.gguf_tokenizer import read_tokenizer

    tokenizer, tokens = read_tokenizer(header.path)
    tokenizer.save_pretrained(directory)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": gguf_mapping.end_of_sequence_ids(header.metadata, tokens),
        "pad_token_id": config["pad_token_id"],
    }
    _write_json(directory / "generation_config.json", generation)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check_space(directory: Path, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < size + _DISK_RESERVE:
        raise OSError(
            f"converting the GGUF file needs {size / 1e9:.1f} GB in {directory}, which has"
            f" {free / 1e9:.1f} GB free; make room or set --cache-dir to another disk"
        )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of ``target``. The kernel lets go of it when the process dies."""
    with (target.parent / f".{target.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
