"""Text to token ids and back, without holding up the streams of other requests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2

from ktserve.api.detokenizer import TokenBytes
from ktserve.api.errors import ApiError, shown
from ktserve.messages import EngineInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

INLINE_CHARACTERS = 4096
"""Text up to this length is tokenized at once, in about two milliseconds; longer text goes to a
thread."""


class Tokenization:
    """One tokenizer, shared by all requests.

    The tokenizer's own Rust object is called, not transformers' wrapper: the wrapper changes the
    truncation settings of that object as it goes, which is no thing to do from several threads.
    Its batch calls are used even for one text, because they alone release the interpreter lock.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.bytes = TokenBytes(tokenizer)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` certainly reaches, known without tokenizing it.

        With it, a text that can never fit is refused before it costs seconds of a core.
        """
        if self._longest_token is None:
            return 0
        return -(-len(text) // self._longest_token)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each of ``texts``.

        The names of special tokens in a text become those tokens, as in transformers.
        """

        def work() -> list[list[int]]:
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.ids for encoding in encodings]

        if sum(len(text) for text in texts) <= INLINE_CHARACTERS:
            return work()
        return await asyncio.to_thread(work)

    async def encode_prompts(
        self, texts: Sequence[str], info: EngineInfo, param: str, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """As `encode`, for prompts in the field ``param``.

        Raises:
            ApiError: 400, a text is certain to be longer than the model's context.
        """
        for text in texts:
            least = self.least_tokens(text) if len(text) > info.context_length else 0
            if least > info.context_length:
                raise ApiError(
                    400,
                    f"{param} has at least {least} tokens; the model's context_length is "
                    f"{info.context_length} tokens, prompt and output together: shorten the prompt",
                    code="context_length_exceeded",
                    param=param,
                )
        return await self.encode(texts, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, special tokens included."""

        def work() -> str:
            texts: list[str] = self._backend.decode_batch([token_ids], skip_special_tokens=False)
            return texts[0]

        if len(token_ids) <= INLINE_CHARACTERS:
            return work()
        return await asyncio.to_thread(work)

    async def render(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model's chat template writes it.

        Raises:
            ApiError: 400, the model has no template, or its template refuses the conversation.
        """
        if self._tokenizer.chat_template is None:
            raise ApiError(
                400,
                "the model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                code="no_chat_template",
                param="messages",
            )

        def work() -> str:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            return str(text)

        try:
            if sum(len(message["content"]) for message in messages) <= INLINE_CHARACTERS:
                return work()
            return await asyncio.to_thread(work)
        except jinja2.TemplateError as error:
            raise ApiError(
                400,
                "messages do not fit the model's chat template: " + shown(error.message or ""),
                code="chat_template_error",
                param="messages",
            ) from None

    @functools.cached_property
    def _longest_token(self) -> int | None:
        """The most bytes of a token, where every byte of a text is sure to end in some token."""
        added = self._backend.get_added_tokens_decoder().values()
        shrinks = self._backend.normalizer is not None or any(
            token.lstrip or token.rstrip for token in added
        )
        if shrinks or not self.bytes.is_byte_level:
            return None
        return max(len(self.bytes.of(token_id)) for token_id in self._backend.get_vocab().values())

    def token_text(self, token_id: int) -> str:
        """How one token is written alone; parts of characters are U+FFFD."""
        return self.bytes.of(token_id).decode(errors="replace")
