"""From a checked body and its prompts to the requests that the engine gets."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ktserve.api import checks, fields
from ktserve.api.errors import ApiError, invalid
from ktserve.api.generation import Job
from ktserve.api.limits import Place, fit
from ktserve.api.sampling import Sampling, choice_seed
from ktserve.api.service import Service
from ktserve.messages import CacheOptions, EngineInfo, Request
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenants import Tenant
from ktserve.tokens import pack

MAX_SEQUENCES = 256
"""The most texts that one HTTP request may ask for: prompts times ``n``."""


@dataclass(frozen=True)
class Prompt:
    """One prompt and where its prefix is kept."""

    namespace: Namespace
    token_ids: list[int]


@dataclass(frozen=True)
class Head:
    """What every event of an answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def new(cls, prefix: str, service: Service, info: EngineInfo) -> Head:
        """The head of a new answer, whose id begins with ``prefix``."""
        return cls(
            id=f"{prefix}-{secrets.token_hex(16)}",
            created=int(time.time()),
            model=service.model,
            fingerprint=service.fingerprint(info),
        )


def take_places(place: Place, prompts: int, n: int) -> None:
    """Hold a place for each choice of each of ``prompts``; to be done before they are tokenized.

    Raises:
        ApiError: 400, they are more than a request or the tenant may ever have; 429, more than the
            tenant may have now.
    """
    if prompts * n > MAX_SEQUENCES:
        raise ApiError(
            400,
            f"{prompts} prompts times n = {n} is more than {MAX_SEQUENCES} texts; "
            "send fewer prompts or a lower n",
            code="too_many_sequences",
            param="n",
        )
    place.take(prompts * n)


def jobs_for(
    service: Service,
    tenant: Tenant,
    info: EngineInfo,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    cache: CacheOptions,
    *,
    default_max_tokens: int | None,
    param: str,
) -> tuple[Job, ...]:
    """``n`` requests for each prompt, with its namespace, prompt by prompt.

    Args:
        default_max_tokens: for a body that sets none, as far as it fits; None is all that fits.
        param: the field that holds the prompts.

    Raises:
        ApiError: 400 with the numbers, when something does not fit.
    """
    jobs = []
    for place, prompt in enumerate(prompts):
        max_tokens = fit(
            len(prompt.token_ids),
            sampling.max_tokens,
            sampling.max_tokens_field,
            info,
            tenant,
            service.settings.cache_sharing,
            param,
        )
        if sampling.max_tokens is None and default_max_tokens is not None:
            max_tokens = min(max_tokens, default_max_tokens)
        if sampling.params.min_tokens > max_tokens:
            raise invalid(
                "min_tokens",
                f"is {sampling.params.min_tokens}, more than {sampling.max_tokens_field}, which is "
                f"{max_tokens} here",
            )
        packed = pack(prompt.token_ids)
        for choice in range(sampling.n):
            params = msgspec.structs.replace(
                sampling.params,
                max_tokens=max_tokens,
                seed=choice_seed(sampling.params.seed, choice),
            )
            request = Request(
                request_id=service.engine.next_request_id(),
                namespace=prompt.namespace,
                prompt=packed,
                sampling=params,
                cache=cache,
            )
            jobs.append(Job(request=request, prompt=place, stops=sampling.stops))
    return tuple(jobs)


def read_stream(body: Mapping[str, object]) -> tuple[bool, bool]:
    """Whether to stream, and whether a stream ends with its usage.

    Raises:
        ApiError: 400, naming the field.
    """
    stream = fields.STREAM.of(body) or False
    options = fields.STREAM_OPTIONS.of(body)
    if options is None:
        return stream, False
    if not stream:
        raise invalid("stream_options", "needs stream; set stream to true or leave it out")
    fields.STREAM_OPTION_FIELDS.check(options, "stream_options.")
    include = options.get("include_usage")
    return stream, include is not None and checks.boolean("stream_options.include_usage", include)
