"""What the setting ``model`` means: the packaged model, a directory, a GGUF file or a hub name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ktserve.models import gguf, packaged
from ktserve.models.progress import Progress, shown

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Kind = Literal["packaged", "directory", "gguf", "hub"]

ACCEPTED = (
    "a local directory in Hugging Face's format (config.json, *.safetensors, tokenizer.json),"
    " a .gguf file, or a hub name like org/name"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]


class ModelNotFound(ValueError):
    """The setting ``model`` leads to nothing that can be loaded; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine.

    Attributes:
        kind: what the setting ``model`` was.
        name: the model's short name, for people and as the default served name.
        directory: holds it in Hugging Face's format. None where `locate` found a model that is
            still to be converted or downloaded.
        gguf: the file that it is, or was, converted from.
        dummy: the weights are to be random, and only the config and tokenizer are in `directory`.
    """

    kind: Kind
    name: str
    directory: Path | None
    gguf: Path | None = None
    dummy: bool = False


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/ktserve``, by default ``~/.cache/ktserve``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ktserve"


def locate(
    model: str | None, load_format: LoadFormat, cache_dir: str | Path | None = None
) -> ModelSource:
    """Say what ``model`` is, without converting or downloading anything.

    Args:
        model: the setting; None is the packaged model.
        cache_dir: where converted models are kept; None is `default_cache_dir`.

    Raises:
        ModelNotFound: it is nothing that is accepted, or not of ``load_format``.
    """
    dummy = load_format == "dummy"
    if model is None:
        if load_format == "safetensors":
            raise ModelNotFound(
                "load_format is safetensors, but the packaged model is a .gguf file; give MODEL or"
                " leave --load-format out"
            )
        return _gguf_source("packaged", packaged.NAME, packaged.find(), dummy, cache_dir)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf" or load_format == "safetensors":
            raise ModelNotFound(
                f"model is the file {path}, with load_format {load_format}; accepted: {ACCEPTED}"
            )
        return _gguf_source("gguf", path.stem, path.resolve(), dummy, cache_dir)
    if load_format == "gguf":
        raise ModelNotFound(f"load_format is gguf, but {model!r} is not a .gguf file")
    if path.is_dir():
        _check_directory(path)
        return ModelSource("directory", path.resolve().name, path.resolve(), dummy=dummy)
    if _HUB_NAME.fullmatch(model) and path.suffix.lower() != ".gguf":
        return ModelSource("hub", model, None, dummy=dummy)
    raise ModelNotFound(f"model {model!r} does not exist here; accepted: {ACCEPTED}")


def resolve(
    model: str | None,
    load_format: LoadFormat,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> ModelSource:
    """Bring ``model`` onto this machine in Hugging Face's format, where it is not there yet.

    Args:
        revision: of a hub model: a branch, tag or commit.
        progress: told how far a conversion has come; None shows it on stderr.

    Returns:
        a source whose ``directory`` is set.

    Raises:
        ModelNotFound: it is nothing that is accepted, or the hub has no such model or cannot be
            reached.
        UnsupportedGguf: a GGUF file that cannot be converted.
        OSError: no room or no right to write the converted model.
    """
    source = locate(model, load_format, cache_dir)
    if revision is not None and source.kind != "hub":
        raise ModelNotFound(
            f"revision is set, but model is not a hub name ({source.kind}); leave --revision out"
        )
    if source.kind == "hub":
        directory = _download(source.name, revision, source.dummy)
        _check_directory(directory)
        return ModelSource("hub", source.name, directory, dummy=source.dummy)
    if source.directory is not None:
        return source
    if source.gguf is None:
        raise AssertionError("a source without a directory has a GGUF file")
    target = _converted(source.gguf, source.dummy, cache_dir)
    if progress is not None:
        gguf.convert(source.gguf, target, progress, weights=not source.dummy)
    else:
        with shown("Converting the GGUF file, once") as bar:
            gguf.convert(source.gguf, target, bar, weights=not source.dummy)
    return ModelSource(source.kind, source.name, target, source.gguf, source.dummy)


def _gguf_source(
    kind: Kind, name: str, path: Path, dummy: bool, cache_dir: str | Path | None
) -> ModelSource:
    target = _converted(path, dummy, cache_dir)
    return ModelSource(kind, name, target if target.is_dir() else None, path, dummy)


def _converted(path: Path, dummy: bool, cache_dir: str | Path | None) -> Path:
    root = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    return root / "models" / (gguf.cache_key(path) + ("-config" if dummy else ""))


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"the directory {path} has no config.json; accepted: {ACCEPTED}")


def check_weights(path: Path) -> None:
    """Raise ModelNotFound where a model directory holds no weights that are read.

    Apart from `resolve`, so that a model that cannot be served at all is refused for that first.
    """
    if not any(path.glob("*.safetensors")):
        raise ModelNotFound(
            f"the directory {path} has no *.safetensors; weights in another format are not read."
            " Convert them, or use --load-format dummy for random weights"
        )


def _download(name: str, revision: str | None, dummy: bool) -> Path:
    # Slow to import, and not needed for a local model.
    from huggingface_hub import constants, snapshot_download

    # HTTPError is its HTTP client's, and that client changed between versions.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = _SMALL_FILES if dummy else [*_SMALL_FILES, "*.safetensors"]
    # Some models keep the same weights a second time, in another layout.
    other_layouts = ["*/*", "consolidated*.safetensors"]
    where = f"the hub model {name!r}" + ("" if revision is None else f" at {revision!r}")
    instead = (
        "give a local directory in Hugging Face's format or a .gguf file instead, or download the"
        " model where there is a network and set HF_HOME to that cache and HF_HUB_OFFLINE=1"
    )
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns=other_layouts
            )
        )
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{where} is gated; accept its terms on the hub and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelNotFound(
            f"the hub does not know {where}, or HF_TOKEN may not see it; {instead}"
        ) from error
    except (OSError, HTTPError) as error:
        reason = type(error.__cause__ or error).__name__
        raise ModelNotFound(
            f"{where} is not in the local hub cache and could not be fetched from"
            f" {constants.ENDPOINT} ({reason}); {instead}"
        ) from error
