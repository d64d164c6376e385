"""The model's tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast


class InvalidTokenizer(ValueError):
    """A model directory's tokenizer, or a chat template, cannot be used; says what to do."""


def load_tokenizer(
    directory: Path, chat_template: str | Path | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer of a model directory.

    Where the directory has a ``tokenizer.json``, torch is not imported.

    Args:
        directory: the model in Hugging Face's format.
        chat_template: a Jinja file that replaces the model's own chat template.

    Raises:
        InvalidTokenizer: the directory holds no tokenizer that can be read, or the template cannot
            be.
    """
    try:
        if (directory / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        else:
            # It imports torch. What it finds here is a SentencePiece or tiktoken file.
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    # The readers raise almost anything for a damaged file, and all of it means the same here.
    except Exception as error:
        raise InvalidTokenizer(
            f"the tokenizer in {directory} cannot be read ({type(error).__name__}: {error}); put"
            " the model's tokenizer.json there"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InvalidTokenizer(
            f"the tokenizer in {directory} is a {type(tokenizer).__name__}, which has no"
            " tokenizer.json form; put the model's tokenizer.json there"
        )
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidTokenizer(
                f"chat_template {str(chat_template)!r} cannot be read as UTF-8 text: {error}"
            ) from error
    return tokenizer
