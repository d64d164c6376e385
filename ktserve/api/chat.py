"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET

from ktserve.api import fields
from ktserve.api.answering import Choice, Plan
from ktserve.api.caching import read_cache
from ktserve.api.conversation import read_messages
from ktserve.api.errors import invalid
from ktserve.api.generation import TokenReport
from ktserve.api.limits import Place
from ktserve.api.namespaces import namespaces
from ktserve.api.planning import Head, Prompt, jobs_for, read_stream, take_places
from ktserve.api.sampling import read_sampling
from ktserve.api.schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Delta,
    Message,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from ktserve.api.service import Service
from ktserve.api.tokenization import Tokenization


async def plan_chat(service: Service, place: Place, body: Mapping[str, object]) -> Plan:
    """Check a chat request's body, take a place for each choice, and make its prompt.

    Raises:
        ApiError: the body, the model's name or the prompt's length is refused, the tenant's places
            are taken, or no engine is ready.
    """
    fields.CHAT_FIELDS.check(body)
    service.check_model(fields.MODEL.of(body))
    info = service.ready_info()
    messages = fields.MESSAGES.of(body)
    if messages is None:
        raise invalid("messages", "is required", code="missing_required_parameter")
    conversation = read_messages(messages, info)
    (namespace,) = namespaces(place.tenant, body, None)
    reports = fields.CHAT_LOGPROBS.of(body) or False
    top = fields.TOP_LOGPROBS.of(body)
    if top is not None and not reports:
        raise invalid("top_logprobs", "needs logprobs; set logprobs to true")
    sampling = read_sampling(body, info, (top or 0) if reports else None)
    cache = read_cache(body, service.settings)
    stream, include_usage = read_stream(body)
    take_places(place, 1, sampling.n)
    text = await service.tokenization.render(conversation, info)
    (tokens,) = await service.tokenization.encode_prompts(
        [text], info, "messages", add_special_tokens=False
    )
    prompts = [Prompt(namespace, tokens)]
    return Plan(
        endpoint="chat_completions",
        prompt_tokens=(len(tokens),),
        jobs=jobs_for(
            service,
            place.tenant,
            info,
            prompts,
            sampling,
            cache,
            default_max_tokens=None,
            param="messages",
        ),
        stream=stream,
        form=ChatForm(
            Head.new("chatcmpl", service, info), service.tokenization, reports, include_usage
        ),
    )


class ChatForm:
    """Answers as OpenAI's chat completion objects."""

    def __init__(
        self, head: Head, tokenization: Tokenization, reports: bool, include_usage: bool
    ) -> None:
        self._head = head
        self._tokenization = tokenization
        self._reports = reports
        self._include_usage = include_usage

    def opening(self, choices: int) -> Sequence[ChatCompletionChunk]:
        """One event for each choice, with the message's role."""
        return [
            self._chunk(index, Delta(role="assistant", content=""), None, None)
            for index in range(choices)
        ]

    def text(self, choice: int, text: str, reports: Sequence[TokenReport]) -> ChatCompletionChunk:
        """The event that adds ``text`` to a choice."""
        return self._chunk(choice, Delta(content=text), self._logprobs(reports), None)

    def ending(
        self, choice: int, finish: str, reports: Sequence[TokenReport]
    ) -> ChatCompletionChunk:
        """The event that says why a choice ended, with the reports that no text waits for."""
        logprobs = self._logprobs(reports) if reports else None
        return self._chunk(choice, Delta(), logprobs, finish)

    def usage(self, usage: Usage) -> ChatCompletionChunk | None:
        """The event after all others, where it was asked for."""
        return self._event([], usage) if self._include_usage else None

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        """The answer that is no stream."""
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=[
                ChatChoice(
                    index=index,
                    message=Message(content=choice.text),
                    logprobs=self._logprobs(choice.reports),
                    finish_reason=choice.finish or "stop",
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )

    def _chunk(
        self, index: int, delta: Delta, logprobs: ChatLogprobs | None, finish: str | None
    ) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return self._event([choice], None)

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=choices,
            usage=usage if self._include_usage else UNSET,
        )

    def _logprobs(self, reports: Sequence[TokenReport]) -> ChatLogprobs | None:
        if not self._reports:
            return None
        return ChatLogprobs(content=[self._token(report) for report in reports])

    def _token(self, report: TokenReport) -> TokenLogprob:
        return TokenLogprob(
            token=self._tokenization.token_text(report.token_id),
            logprob=report.logprob,
            bytes=list(self._tokenization.bytes.of(report.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=self._tokenization.token_text(token_id),
                    logprob=logprob,
                    bytes=list(self._tokenization.bytes.of(token_id)),
                )
                for token_id, logprob in report.top
            ],
        )
