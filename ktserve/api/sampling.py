"""The sampling fields of a body, checked, as the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktserve.api import checks, fields
from ktserve.api.errors import ApiError, invalid, shown
from ktserve.messages import EngineInfo, SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024
_SEEDS = 2**64


@dataclass(frozen=True)
class Sampling:
    """What a body asks for, apart from ``max_tokens``, which depends on the prompt.

    Attributes:
        max_tokens: as sent, or None.
        max_tokens_field: the field that sent it, for error messages.
        params: for the engine; its ``max_tokens`` is still to be set.
        stops: stop strings, which the engine does not see.
    """

    n: int
    max_tokens: int | None
    max_tokens_field: str
    params: SamplingParams
    stops: tuple[str, ...]


def read_sampling(body: Mapping[str, object], info: EngineInfo, logprobs: int | None) -> Sampling:
    """Check every sampling field of ``body``.

    Args:
        logprobs: the alternatives to report, which the two routes ask for in different fields.

    Raises:
        ApiError: 400, naming the field, the limit and the value.
    """
    max_tokens, field = _max_tokens(body)
    min_tokens = fields.MIN_TOKENS.of(body) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"is {min_tokens}, more than {field}, which is {max_tokens}")
    params = SamplingParams(
        max_tokens=max_tokens or 1,
        min_tokens=min_tokens,
        temperature=_or(fields.TEMPERATURE.of(body), 1.0),
        top_k=max(fields.TOP_K.of(body) or 0, 0),
        top_p=_or(fields.TOP_P.of(body), 1.0),
        min_p=_or(fields.MIN_P.of(body), 0.0),
        presence_penalty=_or(fields.PRESENCE_PENALTY.of(body), 0.0),
        frequency_penalty=_or(fields.FREQUENCY_PENALTY.of(body), 0.0),
        repetition_penalty=_or(fields.REPETITION_PENALTY.of(body), 1.0),
        logit_bias=_logit_bias(fields.LOGIT_BIAS.of(body), info.vocab_size),
        seed=fields.SEED.of(body),
        stop_token_ids=_stop_token_ids(fields.STOP_TOKEN_IDS.of(body), info.vocab_size),
        ignore_eos=fields.IGNORE_EOS.of(body) or False,
        logprobs=logprobs,
    )
    return Sampling(
        n=fields.N.of(body) or 1,
        max_tokens=max_tokens,
        max_tokens_field=field,
        params=params,
        stops=_stops(fields.STOP.of(body)),
    )


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of one of ``n`` choices: the next one for each, within 64 bits, signed."""
    if seed is None:
        return None
    return (seed + choice + _SEEDS // 2) % _SEEDS - _SEEDS // 2


def token_id(param: str, value: object, vocab_size: int) -> int:
    """A token id of the model's vocabulary."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise invalid(param, f"must be token ids from 0 to {vocab_size - 1}")
    return value


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(body: Mapping[str, object]) -> tuple[int | None, str]:
    older = fields.MAX_TOKENS_FIELD.of(body)
    newer = fields.MAX_COMPLETION_TOKENS.of(body)
    if older is not None and newer is not None and older != newer:
        raise invalid(
            "max_tokens", f"is {older} and max_completion_tokens is {newer}; send one of them"
        )
    if newer is not None:
        return newer, "max_completion_tokens"
    return older, "max_tokens"


def _logit_bias(value: dict[str, object] | None, vocab_size: int) -> dict[int, float] | None:
    if not value:
        return None
    if len(value) > MAX_BIASES:
        raise invalid("logit_bias", f"has {len(value)} tokens; the limit is {MAX_BIASES}")
    check = checks.number(-100, 100)
    biases: dict[int, float] = {}
    for name, bias in value.items():
        # int() alone would also take " 7", "+7", "1_0" and digits of other scripts.
        if not (name.isascii() and name.isdigit() and len(name) <= 10) or int(name) >= vocab_size:
            raise invalid(
                "logit_bias",
                f"has the key '{shown(name)}'; keys must be token ids from 0 to {vocab_size - 1}",
            )
        if int(name) in biases:
            raise invalid("logit_bias", f"has token {int(name)} twice")
        biases[int(name)] = check(f"logit_bias[{int(name)}]", bias)
    return biases


def _stop_token_ids(value: list[object] | None, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise invalid(
            "stop_token_ids", f"has {len(value)} entries; the limit is {MAX_STOP_TOKEN_IDS}"
        )
    return tuple(token_id("stop_token_ids", item, vocab_size) for item in value)


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = value if isinstance(value, list) else [value]
    if len(items) > MAX_STOPS:
        raise invalid("stop", f"has {len(items)} entries; the limit is {MAX_STOPS}")
    stops = tuple(checks.text("stop", item) for item in items)
    for stop in stops:
        if not stop:
            raise invalid("stop", "must not hold an empty string; leave it out")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise ApiError(
                400,
                f"stop has a string of {len(stop)} characters; the limit is {MAX_STOP_CHARACTERS}",
                code="invalid_value",
                param="stop",
            )
    return stops
