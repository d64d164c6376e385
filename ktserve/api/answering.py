"""How a generation is answered: as one JSON object or as server-sent events, to a client that may
go away at any moment."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ktserve.api.disconnects import ClientGone, unless_gone
from ktserve.api.engine_client import EngineError
from ktserve.api.errors import ApiError
from ktserve.api.generation import Job, Piece, TokenReport, generate
from ktserve.api.schemas import PromptTokensDetails, Usage
from ktserve.api.service import Service
from ktserve.tenancy.encoding import pseudonym

log = logging.getLogger("ktserve.api")

DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One choice of an answer, as far as it has come.

    Attributes:
        pieces: its text, where it is to be sent as one.
        reports: of its tokens, where they are to be sent together.
        waiting_reports: of a stream's tokens whose text has still to come.
        last_at: when its last tokens came.
    """

    pieces: list[str] = field(default_factory=list)
    reports: list[TokenReport] = field(default_factory=list)
    waiting_reports: list[TokenReport] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None
    last_at: float = 0.0

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)

    def add(self, piece: Piece, now: float, *, keep: bool) -> None:
        """Take in what a step added; ``keep`` its text and reports too."""
        if keep:
            self.pieces.append(piece.text)
            self.reports += piece.reports
        self.tokens += piece.tokens
        self.cached_tokens = piece.cached_tokens
        self.finish = piece.finish
        self.last_at = now


class Form(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, choices: int) -> Sequence[msgspec.Struct]:
        """The events before any text."""

    def text(self, choice: int, text: str, reports: Sequence[TokenReport]) -> msgspec.Struct:
        """The event that adds ``text`` to a choice."""

    def ending(self, choice: int, finish: str, reports: Sequence[TokenReport]) -> msgspec.Struct:
        """The one event of a choice that says why it ended."""

    def usage(self, usage: Usage) -> msgspec.Struct | None:
        """The event after all others, where it was asked for."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> msgspec.Struct:
        """The answer that is no stream."""


@dataclass(frozen=True)
class Plan:
    """A checked request, ready for the engine.

    Attributes:
        endpoint: the route's name in metrics.
        prompt_tokens: of each prompt.
        jobs: the choices in the order of their index: all those of a prompt, prompt by prompt.
    """

    endpoint: str
    prompt_tokens: tuple[int, ...]
    jobs: tuple[Job, ...]
    stream: bool
    form: Form


class GenerationResponse(Response):
    """Generates what ``plan`` says while it is being sent.

    All of the engine's work for a request happens inside one call of this object, so that its end,
    whatever the reason, is the end of that work.
    """

    def __init__(self, service: Service, plan: Plan, started: float) -> None:
        super().__init__()
        self._service = service
        self._plan = plan
        self._started = started
        self._choices = [Choice() for _ in plan.jobs]
        self._ended = "error"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._answer(scope, receive, send))
        except ApiError as error:
            self._ended = error.code or "error"
            raise
        except EngineError as error:
            self._ended = error.code
            raise as_api_error(error) from None
        except ClientGone:
            self._ended = "client_gone"
        finally:
            self._log()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = self._plan
        pieces = generate(self._service.engine, self._service.tokenization.bytes, plan.jobs)
        async with aclosing(pieces):
            # The first piece decides the status: a refusal must not come as a 200.
            first = await anext(pieces)
            self._service.metrics.first_token(plan.endpoint, self._service.clock() - self._started)
            if plan.stream:
                await self._stream(first, pieces, send)
            else:
                self._note(first)
                async for piece in pieces:
                    self._note(piece)
                whole = plan.form.whole(self._choices, self._usage())
                response = Response(msgspec.json.encode(whole), media_type="application/json")
                await response(scope, receive, send)
        self._service.metrics.whole(plan.endpoint, self._service.clock() - self._started)

    async def _stream(self, first: Piece, pieces: AsyncIterator[Piece], send: Send) -> None:
        form = self._plan.form
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            events = b"".join(_event(event) for event in form.opening(len(self._choices)))
            await _send_part(send, events + self._events(first))
            async for piece in pieces:
                await _send_part(send, self._events(piece))
            usage = form.usage(self._usage())
            last = DONE if usage is None else _event(usage) + DONE
        except EngineError as error:
            self._ended = error.code
            last = b"data: " + as_api_error(error).body() + b"\n\n"
        except Exception:
            log.exception("a stream failed")
            failure = ApiError(500, "the server failed; this is a bug", code="internal_error")
            last = b"data: " + failure.body() + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _events(self, piece: Piece) -> bytes:
        """The events that a piece gives rise to; text that waits keeps its reports waiting too."""
        self._note(piece)
        form, waiting = self._plan.form, self._choices[piece.choice].waiting_reports
        waiting += piece.reports
        events = b""
        if piece.text:
            events += _event(form.text(piece.choice, piece.text, waiting))
            waiting.clear()
        if piece.finish is not None:
            events += _event(form.ending(piece.choice, piece.finish, waiting))
        return events

    def _note(self, piece: Piece) -> None:
        """Keep what a piece says for the answer, its usage and the metrics."""
        choice, now = self._choices[piece.choice], self._service.clock()
        if choice.tokens and piece.tokens:
            self._service.metrics.next_tokens(
                self._plan.endpoint, now - choice.last_at, piece.tokens
            )
        choice.add(piece, now, keep=not self._plan.stream)

    def _usage(self) -> Usage:
        prompt_tokens = sum(self._plan.prompt_tokens)
        completion_tokens = sum(choice.tokens for choice in self._choices)
        cached: dict[int, int] = {}
        for job, choice in zip(self._plan.jobs, self._choices, strict=True):
            # The choices of a prompt find each other's pages; what the request found is the least.
            cached[job.prompt] = min(choice.cached_tokens, cached.get(job.prompt, 1 << 62))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(cached.values())),
        )

    def _log(self) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        for job, choice in zip(self._plan.jobs, self._choices, strict=True):
            log.debug(
                "request %d of %s: %d prompt tokens, %d cached, %d generated, finish %s",
                job.request.request_id,
                pseudonym(job.request.namespace, self._service.pseudonym_key),
                self._plan.prompt_tokens[job.prompt],
                choice.cached_tokens,
                choice.tokens,
                choice.finish or self._ended,
            )


def _event(event: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def _send_part(send: Send, events: bytes) -> None:
    if events:
        await send({"type": "http.response.body", "body": events, "more_body": True})


def as_api_error(error: EngineError) -> ApiError:
    """What the client is told of a request that the engine did not complete."""
    return ApiError(error.status, error.message, code=error.code, retry_after=error.retry_after)
