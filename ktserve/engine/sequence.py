"""One request on its way through the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktserve.cache.reasons import Reason
from ktserve.cache.tables import BlockTable
from ktserve.messages import Request
from ktserve.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from ktserve.engine.penalties import TokenCounts


class Sequence:
    """A request and what the engine has done for it so far.

    The request itself is held as it came: the namespace, the prompt and the sampling parameters
    are read from it and never copied into another object.

    ::

        |<------------------ length ------------------->|
        |<--------- prompt --------->|<-- generated --->|
        |<------ computed ------>|<----- remaining ---->|

    Attributes:
        request: what was asked for.
        seed: of its random draws; the request's own, or the one drawn for it.
        arrival: when it came, in seconds of a monotonic clock.
        tokens: packed ids, prompt and generated.
        prompt_tokens: tokens of the prompt.
        length: tokens so far.
        computed: tokens whose keys and values are in pages.
        table: its pages, while it runs.
        cached_tokens: prompt tokens from the cache at its first admission; None before.
        reason: why so many; None before.
        preemptions: times it lost its pages and had to start over.
        announced: its first output was sent.
        counts: of its tokens, once a penalty needs them.
    """

    __slots__ = (
        "announced",
        "arrival",
        "cached_tokens",
        "computed",
        "counts",
        "length",
        "preemptions",
        "prompt_tokens",
        "reason",
        "request",
        "seed",
        "table",
        "tokens",
    )

    def __init__(self, request: Request, *, seed: int, arrival: float) -> None:
        self.request = request
        self.seed = seed
        self.arrival = arrival
        self.tokens = bytearray(request.prompt)
        self.length = self.prompt_tokens = len(request.prompt) // TOKEN_BYTES
        self.computed = 0
        self.table: BlockTable | None = None
        self.cached_tokens: int | None = None
        self.reason: Reason | None = None
        self.preemptions = 0
        self.announced = False
        self.counts: TokenCounts | None = None

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return self.length - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.length - self.computed

    @property
    def longest(self) -> int:
        """Tokens it can come to have."""
        return self.prompt_tokens + self.request.sampling.max_tokens

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.tokens += token.to_bytes(TOKEN_BYTES, "little")
        self.length += 1

    def written(self) -> bytes:
        """The tokens whose keys and values are in pages, packed."""
        return bytes(self.tokens[: self.computed * TOKEN_BYTES])
