"""The bodies that the routes answer with: OpenAI's objects, and vLLM's for tokens."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the prompt's tokens came from the cache; 0, never null, when none did."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens in and out. A prompt counts once, however many choices continue it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen token at one position and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """A chat choice's log-probabilities."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """A completion choice's log-probabilities; the offsets are characters of its text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One whole text, or what an event adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/completions, and one event of its stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None
    object: Literal["text_completion"] = "text_completion"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: Literal["ktserve"] = "ktserve"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/detokenize."""

    prompt: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /health and /ready; ``reason`` says why the server is not ready."""

    status: str
    reason: str | None = None
