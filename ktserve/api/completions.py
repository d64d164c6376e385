"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from msgspec import UNSET, UnsetType

from ktserve.api import checks, fields
from ktserve.api.answering import Choice, Plan
from ktserve.api.caching import read_cache
from ktserve.api.errors import invalid
from ktserve.api.generation import TokenReport
from ktserve.api.limits import Place
from ktserve.api.namespaces import namespaces
from ktserve.api.planning import Head, Prompt, jobs_for, read_stream, take_places
from ktserve.api.sampling import read_sampling, token_id
from ktserve.api.schemas import Completion, CompletionChoice, CompletionLogprobs, Usage
from ktserve.api.service import Service
from ktserve.api.tokenization import Tokenization
from ktserve.messages import EngineInfo

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

MAX_PROMPTS = 256


async def plan_completion(service: Service, place: Place, body: Mapping[str, object]) -> Plan:
    """Check a completion request's body, take a place for each text, and make its prompts.

    Raises:
        ApiError: the body, the model's name or a prompt's length is refused, the tenant's places
            are taken, or no engine is ready.
    """
    fields.COMPLETION_FIELDS.check(body)
    service.check_model(fields.MODEL.of(body))
    info = service.ready_info()
    batch = _read_prompt(fields.PROMPT.of(body), info)
    prompt_namespaces = namespaces(place.tenant, body, batch.length)
    logprobs = fields.LOGPROBS.of(body)
    sampling = read_sampling(body, info, logprobs)
    best_of = fields.BEST_OF.of(body)
    if best_of is not None and best_of != sampling.n:
        raise invalid(
            "best_of", f"must equal n, which is {sampling.n}, in this version; leave it out"
        )
    cache = read_cache(body, service.settings)
    stream, include_usage = read_stream(body)
    take_places(place, len(prompt_namespaces), sampling.n)
    tokens = batch.token_ids or await service.tokenization.encode_prompts(
        batch.texts, info, "prompt", add_special_tokens=True
    )
    prompts = [
        Prompt(namespace, token_ids)
        for namespace, token_ids in zip(prompt_namespaces, tokens, strict=True)
    ]
    return Plan(
        endpoint="completions",
        prompt_tokens=tuple(len(token_ids) for token_ids in tokens),
        jobs=jobs_for(
            service,
            place.tenant,
            info,
            prompts,
            sampling,
            cache,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            param="prompt",
        ),
        stream=stream,
        form=CompletionForm(
            Head.new("cmpl", service, info), service.tokenization, logprobs, include_usage
        ),
    )


class CompletionForm:
    """Answers as OpenAI's completion objects."""

    def __init__(
        self, head: Head, tokenization: Tokenization, logprobs: int | None, include_usage: bool
    ) -> None:
        self._head = head
        self._tokenization = tokenization
        self._logprobs = logprobs
        self._include_usage = include_usage

    def opening(self, choices: int) -> Sequence[Completion]:  # noqa: ARG002
        """Nothing: a completion has no role."""
        return ()

    def text(self, choice: int, text: str, reports: Sequence[TokenReport]) -> Completion:
        """The event that adds ``text`` to a choice."""
        return self._chunk(choice, text, self._report(reports), None)

    def ending(self, choice: int, finish: str, reports: Sequence[TokenReport]) -> Completion:
        """The event that says why a choice ended, with the reports that no text waits for."""
        return self._chunk(choice, "", self._report(reports) if reports else None, finish)

    def usage(self, usage: Usage) -> Completion | None:
        """The event after all others, where it was asked for."""
        return self._completion([], usage) if self._include_usage else None

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Completion:
        """The answer that is no stream."""
        return self._completion(
            [
                CompletionChoice(
                    index=index,
                    text=choice.text,
                    logprobs=self._report(choice.reports),
                    finish_reason=choice.finish,
                )
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def _chunk(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, finish: str | None
    ) -> Completion:
        choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)
        return self._completion([choice], None if self._include_usage else UNSET)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _report(self, reports: Sequence[TokenReport]) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        return CompletionLogprobs(
            tokens=[self._name(report.token_id) for report in reports],
            token_logprobs=[report.logprob for report in reports],
            top_logprobs=[self._alternatives(report) for report in reports],
            text_offset=[report.offset for report in reports],
        )

    def _alternatives(self, report: TokenReport) -> dict[str, float]:
        """The likeliest tokens and the chosen one, where that is not among them: as OpenAI does."""
        named = {self._name(token_id): logprob for token_id, logprob in report.top}
        named.setdefault(self._name(report.token_id), report.logprob)
        return named

    def _name(self, token_id: int) -> str:
        """A token's text, or its bytes where they are no text: names must tell tokens apart."""
        data = self._tokenization.bytes.of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True)
class _Batch:
    """The field ``prompt``: texts, or token ids.

    Attributes:
        length: how many prompts the list has; None when the field is a single prompt.
    """

    length: int | None
    texts: list[str]
    token_ids: list[list[int]]


def _read_prompt(value: object, info: EngineInfo) -> _Batch:
    if value is None:
        raise invalid("prompt", "is required", code="missing_required_parameter")
    if isinstance(value, str):
        return _Batch(None, [checks.text("prompt", value)], [])
    if not isinstance(value, list):
        raise invalid(
            "prompt",
            f"must be a string, token ids, or a list of either, not {checks.json_type(value)}",
        )
    if not value:
        raise invalid("prompt", "must not be empty", code="empty_prompt")
    if isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise invalid("prompt", f"has {len(value)} entries; the limit is {MAX_PROMPTS}")
        if isinstance(value[0], str):
            return _Batch(len(value), [checks.text("prompt", item) for item in value], [])
        items = [checks.array("prompt", item) for item in value]
        return _Batch(len(value), [], [_token_ids(item, info) for item in items])
    return _Batch(None, [], [_token_ids(value, info)])


def _token_ids(value: list[object], info: EngineInfo) -> list[int]:
    if not value:
        raise invalid("prompt", "has no tokens; send at least one", code="empty_prompt")
    if len(value) > info.context_length:
        raise invalid(
            "prompt",
            f"has {len(value)} tokens; the model's context_length is {info.context_length} tokens, "
            "prompt and output together: shorten the prompt",
            code="context_length_exceeded",
        )
    for item in value:
        token_id("prompt", item, info.vocab_size)
    return cast(list[int], value)
