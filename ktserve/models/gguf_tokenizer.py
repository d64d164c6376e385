"""The tokenizer that a GGUF file carries, as a tokenizer of transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

logger = logging.getLogger(__name__)

_DIGITS_ALONE = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""Byte-level vocabularies whose text is split at every digit first (``llama-vocab.cpp``);
transformers would split it like GPT-2's and make other tokens of ``"  12"``."""

_LIKE_GPT2 = frozenset({"gpt-2", "default", "phi-2", "olmo", "jais"})


def read_tokenizer(path: Path) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """The tokenizer of the GGUF file at ``path``, with its chat template, and the vocabulary.

    Returns:
        the tokenizer, and the tokens as the file spells them, by id.
    """
    architecture, fields, settings = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, fields)
    _split_as_trained(backend, fields)
    tokenizer: PreTrainedTokenizerFast = cast("Any", PreTrainedTokenizerFast)(
        tokenizer_object=backend,
        add_bos_token=bool(settings.get("add_bos_token", False)),
        add_eos_token=bool(settings.get("add_eos_token", False)),
        clean_up_tokenization_spaces=False,
        **{name: settings[name] for name in _named(settings)},
    )
    tokenizer.chat_template = settings.get("chat_template")
    return tokenizer, list(fields["tokens"])


def _named(settings: dict[str, Any]) -> list[str]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return [name for name in names if settings.get(name) is not None]


def _split_as_trained(backend: Tokenizer, fields: dict[str, Any]) -> None:
    """Split text the way the vocabulary's merges were learned, where transformers does not."""
    if fields.get("tokenizer_type") != "gpt2":
        return
    split = fields.get("pre_tokenizer_type")
    if split in _DIGITS_ALONE:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif split not in GGUF_PRE_TOKENIZER_SPLITS and split not in _LIKE_GPT2:
        logger.warning(
            "The GGUF file's tokenizer.ggml.pre is %.40r, which is not known here: text is split"
            " as GPT-2 does, and its tokens may differ from the model's own. A directory in"
            " Hugging Face's format brings the exact tokenizer.",
            split,
        )
