"""Text to token ids and back, without holding up the streams of other requests."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import jinja2

from ktserve.api.detokenizer import TokenBytes
from ktserve.api.errors import ApiError, invalid, shown
from ktserve.messages import EngineInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

INLINE_CHARACTERS = 4096
"""Text up to this length is tokenized at once, in about two milliseconds; longer text goes to a
thread."""

MESSAGE_CHARACTERS = 64
"""What a message costs a template beside its text, as characters; an estimate."""

THREADS = 2
"""Of their own, so that texts wait for other texts and for nothing else, nor anything for them."""


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
        self._longest_token = max(map(len, self._backend.get_vocab()))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizing")
        self.bytes = TokenBytes(tokenizer)

    def check_length(self, text: str, info: EngineInfo, param: str) -> None:
        """Refuse a text too long to fit the context, before it costs seconds of a core.

        The limit is the characters of a whole context of the vocabulary's longest token. Of a
        tokenizer that drops nothing, as byte-level ones, no longer text could ever fit.

        Raises:
            ApiError: 400 with the numbers.
        """
        limit = info.context_length * self._longest_token
        if len(text) > limit:
            raise invalid(
                param,
                f"has {len(text)} characters; the limit is {limit}, which is the model's "
                f"context_length of {info.context_length} tokens times the {self._longest_token} "
                "characters of its longest token: shorten it",
                code="context_length_exceeded",
            )

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each of ``texts``.

        The names of special tokens in a text become those tokens, as in transformers.
        """

        def work(texts: Sequence[str]) -> list[list[int]]:
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.ids for encoding in encodings]

        if sum(len(text) for text in texts) <= INLINE_CHARACTERS:
            return work(texts)
        # One at a time, so that the texts of other requests have their turn between them.
        ids = []
        for text in texts:
            ids += await self._in_thread(functools.partial(work, [text]))
        return ids

    async def encode_prompts(
        self, texts: Sequence[str], info: EngineInfo, param: str, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """As `encode`, for prompts in the field ``param``.

        Raises:
            ApiError: 400, a text is too long for the model's context, or has a token that the
                tokenizer knows and the model does not.
        """
        for text in texts:
            self.check_length(text, info, param)
        prompts = await self.encode(texts, add_special_tokens=add_special_tokens)
        highest = max((max(ids) for ids in prompts if ids), default=0)
        if highest >= info.vocab_size:
            # Without the token's text, which is the prompt's.
            raise invalid(
                param,
                f"has text that becomes the token id {highest}; the model has ids from 0 to "
                f"{info.vocab_size - 1}: /v1/tokenize shows which text it is; leave that out",
            )
        return prompts

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, special tokens included."""

        def work() -> str:
            texts: list[str] = self._backend.decode_batch([token_ids], skip_special_tokens=False)
            return texts[0]

        if len(token_ids) <= INLINE_CHARACTERS:
            return work()
        return await self._in_thread(work)

    async def render(
        self,
        messages: list[dict[str, str]],
        info: EngineInfo,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as the model's chat template writes it.

        Raises:
            ApiError: 400, the messages are too long, the model has no template, or its template
                refuses the conversation or would ignore a message's name.
        """
        if not self.has_chat_template:
            raise ApiError(
                400,
                "the model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                code="no_chat_template",
                param="messages",
            )
        for place, message in enumerate(messages):
            self.check_length(message["content"], info, f"messages[{place}].content")

        def work() -> str:
            self._check_names(messages)
            return self.apply_template(messages, add_generation_prompt=add_generation_prompt)

        size = sum(MESSAGE_CHARACTERS + sum(map(len, message.values())) for message in messages)
        try:
            return work() if size <= INLINE_CHARACTERS else await self._in_thread(work)
        except jinja2.TemplateError as error:
            raise ApiError(
                400,
                "messages do not fit the model's chat template: " + shown(error.message or ""),
                code="chat_template_error",
                param="messages",
            ) from None

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._tokenizer.chat_template is not None

    def apply_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """As `render`, at once and unchecked.

        Raises:
            jinja2.TemplateError: the template refuses the conversation.
        """
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def _check_names(self, messages: list[dict[str, str]]) -> None:
        """Raise the 400 for the first ``name`` that the template does not write.

        Most templates have no use for names. Whether this one has is seen by rendering words that
        no message holds in the place of the names.
        """
        words = {
            place: f"n{secrets.token_hex(16)}"
            for place, message in enumerate(messages)
            if "name" in message
        }
        if not words:
            return
        trial = [
            {**message, "name": words[place]} if place in words else message
            for place, message in enumerate(messages)
        ]
        text = self.apply_template(trial, add_generation_prompt=False)
        for place, word in words.items():
            if word not in text:
                raise invalid(
                    f"messages[{place}].name",
                    "is not supported: the model's chat template does not write it; leave it out",
                    code="unsupported_parameter",
                )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def token_text(self, token_id: int) -> str:
        """How one token is written alone; parts of characters are U+FFFD."""
        return self.bytes.of(token_id).decode(errors="replace")
