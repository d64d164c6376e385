"""A server under measurement, and one streamed request to it."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from ktserve.bench.sse import data_lines

Endpoint = Literal["chat", "completions"]
Clock = Callable[[], float]

_PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_OPTIONAL: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
_MAX_REASON = 300


class TargetError(Exception):
    """The server cannot be measured; the message says why and what to do."""


class RequestFailed(Exception):
    """One request did not end as it should; the message is short and holds no prompt."""


@dataclass(frozen=True)
class Prompt:
    """What a request asks: a shared ``system`` part, which may be empty, and the user's text."""

    user: str
    system: str = ""


@dataclass(frozen=True)
class Sample:
    """One request that went well. Times are seconds of the clock, tokens as the server counts.

    Attributes:
        sent: just before the request went out.
        first: when the first text was there; with no text at all, when the stream ended.
        last: when the last text or the finish was there.
        output_tokens: from the server's usage, else the number of pieces of text.
        prompt_tokens: from the server's usage; None where it reports none.
        cached_tokens: those of them that came from a cache; None where it reports none.
        counted: ``output_tokens`` is the server's own count.
    """

    sent: float
    first: float
    last: float
    output_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    counted: bool

    @property
    def time_to_first_token(self) -> float:
        """Seconds."""
        return self.first - self.sent

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first: its tokens less one, over the time after its first.

        Raises:
            RequestFailed: it has fewer than two tokens, or they all came at one moment.
        """
        if self.output_tokens < 2 or self.last <= self.first:
            raise RequestFailed(
                f"gave {self.output_tokens} tokens in {self.last - self.first:.3f} s after the "
                "first, too little to tell a rate; ask for more with --output-tokens"
            )
        return (self.output_tokens - 1) / (self.last - self.first)


@dataclass
class Target:
    """An OpenAI-compatible server.

    Attributes:
        label: its short name in tables.
        url: without a path.
        model: as it stands in requests; found by `prepare` where it is empty.
        extra: fields that are added to every request, for example what turns its end-of-sequence
            token off where it has no ``ignore_eos``.
        accepted: the optional fields that it takes; `prepare` finds out.
        reported: what the server says of itself, for the record.
    """

    label: str
    url: str
    client: httpx.AsyncClient
    endpoint: Endpoint
    model: str
    extra: Mapping[str, Any]
    clock: Clock = time.perf_counter
    accepted: dict[str, Any] = field(default_factory=dict)
    reported: dict[str, Any] = field(default_factory=dict)

    async def prepare(self) -> None:
        """Find the model, what the server says of itself and which optional fields it takes.

        Raises:
            TargetError: it cannot be reached, or no request succeeds.
        """
        models = await self._get("/v1/models")
        if models is None:
            raise TargetError(
                f"{self.url}: GET /v1/models gave no JSON; is an OpenAI server there?"
            )
        listed = models.get("data") if isinstance(models, dict) else None
        entries = [entry for entry in listed or [] if isinstance(entry, dict)]
        if not self.model:
            if len(entries) != 1:
                raise TargetError(
                    f"{self.url}: lists {len(entries)} models; name one with --model or --vs-model"
                )
            self.model = str(entries[0].get("id"))
        self.reported["models"] = entries[:10]
        version = await self._get("/version")
        if isinstance(version, dict):
            self.reported["version"] = version
        await self._find_accepted()

    async def stream(self, prompt: Prompt, output_tokens: int) -> Sample:
        """Send ``prompt`` and read the answer to its end, greedy.

        Raises:
            RequestFailed: any other ending than a whole answer.
        """
        return await self._stream(self._body(prompt, output_tokens, self.accepted))

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of ``text`` from the server's ``/v1/tokenize``; None where it has none."""
        try:
            response = await self.client.post(
                "/v1/tokenize", json={"model": self.model, "prompt": text}
            )
            answer = response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        if not isinstance(answer, dict):
            return None
        if isinstance(answer.get("count"), int):
            return int(answer["count"])
        tokens = answer.get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    async def _find_accepted(self) -> None:
        choices = [
            _OPTIONAL,
            {key: value for key, value in _OPTIONAL.items() if key != "ignore_eos"},
            {key: value for key, value in _OPTIONAL.items() if key != "stream_options"},
            {},
        ]
        prompt = Prompt("Say one word.")
        problem = ""
        for fields in choices:
            try:
                await self._stream(self._body(prompt, 2, fields))
            except RequestFailed as error:
                problem = problem or str(error)
            else:
                self.accepted = fields
                return
        raise TargetError(f"{self.url}: a first request failed: {problem}")

    def _body(
        self, prompt: Prompt, output_tokens: int, optional: Mapping[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            **optional,
            **self.extra,
        }
        if self.endpoint == "chat":
            roles = {"system": prompt.system, "user": prompt.user}
            body["messages"] = [
                {"role": role, "content": text} for role, text in roles.items() if text
            ]
        else:
            body["prompt"] = "\n\n".join(text for text in (prompt.system, prompt.user) if text)
        return body

    async def _stream(self, body: dict[str, Any]) -> Sample:
        sent = self.clock()
        reading = _Reading()
        try:
            async with self.client.stream("POST", _PATHS[self.endpoint], json=body) as response:
                if response.status_code != 200:
                    detail = (await response.aread()).decode(errors="replace")
                    raise RequestFailed(f"HTTP {response.status_code}: {detail[:_MAX_REASON]}")
                async for line in data_lines(response.aiter_bytes()):
                    reading.take(line, self.clock())
        except httpx.TimeoutException:
            raise RequestFailed(
                "no answer within the time limit of a request; see --request-timeout"
            ) from None
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {str(error)[:_MAX_REASON]}") from None
        return reading.sample(sent)

    async def _get(self, path: str) -> Any:
        try:
            response = await self.client.get(path)
        except httpx.HTTPError as error:
            raise TargetError(
                f"{self.url}: cannot be reached ({type(error).__name__}); start the server, or "
                "name another with --url or --vs"
            ) from None
        if response.status_code in (401, 403):
            raise TargetError(
                f"{self.url}: refuses the API key (HTTP {response.status_code}); "
                "set --api-key or --vs-api-key"
            )
        if response.status_code != 200:
            return None
        try:
            return response.json()
        except ValueError:
            return None


@dataclass
class _Reading:
    """What has been seen of one answer."""

    first: float | None = None
    last: float = 0.0
    pieces: int = 0
    finished: bool = False
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, line: bytes, now: float) -> None:
        if line in (b"", b"[DONE]"):
            return
        try:
            chunk = json.loads(line)
        except ValueError:
            raise RequestFailed("the stream holds a data line that is no JSON") from None
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise RequestFailed(f"the stream ends in an error: {str(chunk)[:_MAX_REASON]}")
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            if text:
                self.pieces += 1
                self.first = now if self.first is None else self.first
            if text or choice.get("finish_reason"):
                self.last = now
            self.finished = self.finished or bool(choice.get("finish_reason"))

    def sample(self, sent: float) -> Sample:
        if not self.finished:
            raise RequestFailed("the stream ended before the answer was finished")
        output = _count(self.usage.get("completion_tokens"))
        details = self.usage.get("prompt_tokens_details")
        return Sample(
            sent=sent,
            first=self.last if self.first is None else self.first,
            last=self.last,
            output_tokens=self.pieces if output is None else output,
            prompt_tokens=_count(self.usage.get("prompt_tokens")),
            cached_tokens=_count(
                details.get("cached_tokens") if isinstance(details, dict) else None
            ),
            counted=output is not None,
        )


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def is_loopback(url: str) -> bool:
    """Whether the host of ``url`` is this machine by its very name: no name is looked up.

    Raises:
        ValueError: ``url`` is no http or https address with a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http:// or https:// address")
    if parts.username or parts.password or parts.query or parts.path not in ("", "/"):
        raise ValueError(f"the address of {parts.hostname!r} must end after the port")
    if parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return False
