"""What each field of a request body means to this version: honoured, inert or refused.

A field that would change the answer is either honoured or refused by name, never ignored. The
tables are the one place where a field is declared; the documentation's table is made from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ktserve.api import checks
from ktserve.api.errors import SHOWN_CHARACTERS, ApiError, invalid, shown

T_co = TypeVar("T_co", covariant=True)

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
MAX_PRIORITY = 100


@dataclass(frozen=True)
class Honoured(Generic[T_co]):
    """A field that does what its name says.

    Attributes:
        check: gives the value with its type, or raises the 400 that names the field.
        meaning: one line for the documentation.
    """

    name: str
    check: Callable[[str, object], T_co]
    meaning: str

    def of(self, body: Mapping[str, object], within: str = "") -> T_co | None:
        """The checked value, or None where it is absent or null.

        Args:
            within: what stands before the field's name where ``body`` is a part of the whole.
        """
        value = body.get(self.name)
        return None if value is None else self.check(within + self.name, value)


@dataclass(frozen=True)
class Inert:
    """A field that is accepted and changes nothing about the answer, and why that is right.

    Attributes:
        check: raises the 400 for a value of a type that the field never has; a client that sends
            one means something else.
    """

    name: str
    check: Callable[[str, object], object]
    meaning: str


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer in a way that this version does not know.

    Attributes:
        neutral: the values that ask for nothing, and are therefore accepted; null always is.
        meaning: what it would do.
        remedy: what to do instead.
    """

    name: str
    meaning: str
    neutral: tuple[object, ...] = ()
    remedy: str = "leave it out"

    def refuse(self, body: Mapping[str, object]) -> None:
        """Raise the 400 unless the field is absent, null or neutral."""
        value = body.get(self.name)
        if value is None or any(_same(value, neutral) for neutral in self.neutral):
            return
        raise invalid(
            self.name,
            f"is not supported by this version; {self.remedy}",
            code="unsupported_parameter",
        )


Field = Honoured[object] | Inert | Refused


class FieldTable:
    """All the fields of one route's body."""

    def __init__(self, *fields: Honoured[object] | Inert | Refused) -> None:
        self.fields = {field.name: field for field in fields}
        if len(self.fields) != len(fields):
            raise ValueError("a field is declared twice")
        self._refused = [field for field in fields if isinstance(field, Refused)]
        self._inert = [field for field in fields if isinstance(field, Inert)]

    def check(self, body: Mapping[str, object], within: str = "") -> None:
        """Raise a 400 for the first field that is unknown, refused, or inert and of a wrong type.

        Args:
            within: what stands before a field's name where ``body`` is a part of the whole.
        """
        for name in body:
            if name not in self.fields:
                raise ApiError(
                    400,
                    f"unknown field '{within}{shown(name)}'{self._suggestion(name)}",
                    code="unknown_parameter",
                    param=within + shown(name),
                )
        for field in self._refused:
            field.refuse(body)
        for inert in self._inert:
            value = body.get(inert.name)
            if value is not None:
                inert.check(within + inert.name, value)

    def _suggestion(self, name: str) -> str:
        if len(name) > SHOWN_CHARACTERS:
            return ""
        near = difflib.get_close_matches(name, self.fields, n=1)
        return f"; did you mean '{near[0]}'?" if near else "; leave it out"


def unchecked(_param: str, value: object) -> object:
    """The check of a field whose form depends on others; its route checks it."""
    return value


def _same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


def _boolean(name: str, meaning: str) -> Honoured[bool]:
    return Honoured(name, checks.boolean, meaning)


MODEL = Honoured("model", checks.text, "must be the served model's name")
MESSAGES = Honoured("messages", checks.array, "the conversation")
PROMPT = Honoured("prompt", unchecked, "a string, token ids, or a list of either")
TEXT_PROMPT = Honoured("prompt", checks.text, "the text")
STREAM = _boolean("stream", "answer as server-sent events")
STREAM_OPTIONS = Honoured("stream_options", checks.mapping, "include_usage adds a last usage chunk")
N = Honoured("n", checks.whole(1, MAX_CHOICES), "choices for each prompt")
MAX_TOKENS_FIELD = Honoured(
    "max_tokens", checks.whole(1, MAX_TOKENS), "the most tokens to generate"
)
MAX_COMPLETION_TOKENS = Honoured(
    "max_completion_tokens", checks.whole(1, MAX_TOKENS), "the same, by its newer name"
)
MIN_TOKENS = Honoured("min_tokens", checks.whole(0, MAX_TOKENS), "do not end before these many")
TEMPERATURE = Honoured("temperature", checks.number(0, 2), "0 is greedy")
TOP_P = Honoured("top_p", checks.number(0, 1, above_minimum=True), "nucleus sampling")
TOP_K = Honoured("top_k", checks.whole(-1, MAX_TOKENS), "the k likeliest; -1 and 0 are off")
MIN_P = Honoured("min_p", checks.number(0, 1), "least probability relative to the likeliest")
PRESENCE_PENALTY = Honoured("presence_penalty", checks.number(-2, 2), "OpenAI's")
FREQUENCY_PENALTY = Honoured("frequency_penalty", checks.number(-2, 2), "OpenAI's")
REPETITION_PENALTY = Honoured(
    "repetition_penalty", checks.number(0, 2, above_minimum=True), "1 is off"
)
LOGIT_BIAS = Honoured("logit_bias", checks.mapping, "token id to a bias from -100 to 100")
SEED = Honoured("seed", checks.whole(-(2**63), 2**63 - 1), "the same tokens for the same seed")
STOP = Honoured("stop", unchecked, "a string or up to 16; the text ends before it")
STOP_TOKEN_IDS = Honoured("stop_token_ids", checks.array, "token ids that end the text")
IGNORE_EOS = _boolean("ignore_eos", "the model's own end does not end the text")
CHAT_LOGPROBS = _boolean("logprobs", "report log-probabilities")
TOP_LOGPROBS = Honoured(
    "top_logprobs", checks.whole(0, MAX_LOGPROBS), "alternatives for each token"
)
LOGPROBS = Honoured("logprobs", checks.whole(0, MAX_LOGPROBS), "alternatives for each token")
BEST_OF = Honoured("best_of", checks.whole(1, MAX_CHOICES), "accepted where it equals n")
CACHE_SALT = Honoured("cache_salt", unchecked, "subdivides the tenant's cache")
EXTRA_KEY = Honoured("extra_key", unchecked, "subdivides the tenant's cache, independently")
CACHE = Honoured("cache", checks.mapping, "how this request uses the cache: an object")
INSERT = _boolean("insert", "keep what this request computes; true unless set")
LOOKUP = _boolean("lookup", "start from what is kept; true unless set")
PRIORITY = Honoured(
    "priority",
    checks.whole(0, MAX_PRIORITY),
    "what has a higher one is evicted later, with `--radix-eviction-policy priority`",
)
TOKENS = Honoured("tokens", checks.array, "the token ids")
ADD_SPECIAL_TOKENS = _boolean("add_special_tokens", "add the tokenizer's own first and last tokens")
ADD_GENERATION_PROMPT = _boolean("add_generation_prompt", "end with the assistant's opening")
RETURN_TOKEN_STRS = _boolean("return_token_strs", "give each token's text too")

_SAMPLING: tuple[Honoured[object], ...] = (
    N, MIN_TOKENS, TEMPERATURE, TOP_P, TOP_K, MIN_P, PRESENCE_PENALTY, FREQUENCY_PENALTY,
    REPETITION_PENALTY, LOGIT_BIAS, SEED, STOP, STOP_TOKEN_IDS, IGNORE_EOS, STREAM, STREAM_OPTIONS,
    CACHE_SALT, EXTRA_KEY, CACHE,
)  # fmt: skip

_INERT = (
    Inert("user", checks.text, "the tenant comes from the key alone; never logged"),
    Inert("safety_identifier", checks.text, "the tenant comes from the key alone; never logged"),
    Inert("metadata", checks.mapping, "nothing is stored"),
    Inert("service_tier", checks.text, "there is one"),
    Inert("prompt_cache_key", checks.text, "every prompt is looked up in its namespace"),
    Inert("prompt_cache_retention", checks.text, "pages stay until their room is needed"),
    Inert("prediction", checks.mapping, "a hint for speed, never for the text"),
)

_REFUSED = (
    Refused("store", "keeps the answer", (False,)),
    Refused("response_format", "constrains the text", ({"type": "text"},)),
    Refused("structured_outputs", "constrains the text"),
    Refused("guided_json", "constrains the text"),
    Refused("guided_regex", "constrains the text"),
    Refused("guided_choice", "constrains the text"),
    Refused("guided_grammar", "constrains the text"),
    Refused("json_schema", "constrains the text"),
    Refused("regex", "constrains the text"),
    Refused("ebnf", "constrains the text"),
    Refused("choice", "constrains the text"),
    Refused("grammar", "constrains the text"),
    Refused("logits_processors", "changes the logits"),
    Refused("custom_logit_processor", "changes the logits"),
    Refused("custom_params", "changes the logits"),
    Refused("logits_bias", "changes the logits", remedy="use logit_bias"),
    Refused("bad_words", "changes the logits", ([],)),
    Refused("allowed_token_ids", "changes the logits"),
    Refused("stop_regex", "ends the text", ([],)),
    Refused("use_beam_search", "searches instead of sampling", (False,)),
    Refused("length_penalty", "weighs beams", (1, 1.0)),
    Refused("early_stopping", "ends beams", (False,)),
    Refused("include_stop_str_in_output", "adds the stop string to the text", (False,)),
    Refused("no_stop_trim", "adds the stop string to the text", (False,)),
    Refused("skip_special_tokens", "adds special tokens to the text", (True,)),
    Refused("spaces_between_special_tokens", "changes the text", (True,)),
    Refused("truncate_prompt_tokens", "shortens the prompt"),
    Refused("prompt_logprobs", "reports the prompt's log-probabilities"),
    Refused("return_token_ids", "adds token ids to the answer", (False,)),
    Refused("return_hidden_states", "adds hidden states to the answer", (False,)),
    Refused("lora_path", "selects an adapter"),
    Refused("priority", "reorders the queue", (0,)),
    Refused("kv_transfer_params", "moves pages"),
)

CHAT_FIELDS = FieldTable(
    MODEL, MESSAGES, MAX_TOKENS_FIELD, MAX_COMPLETION_TOKENS, CHAT_LOGPROBS, TOP_LOGPROBS,
    *_SAMPLING,
    *_INERT,
    Inert("parallel_tool_calls", checks.boolean, "there are no tools"),
    *_REFUSED,
    Refused("tools", "lets the model call functions", ([],)),
    Refused("tool_choice", "lets the model call functions", ("none", "auto")),
    Refused("functions", "lets the model call functions", ([],)),
    Refused("function_call", "lets the model call functions", ("none", "auto")),
    Refused("audio", "answers with sound"),
    Refused("modalities", "answers with other than text", (["text"],)),
    Refused("reasoning_effort", "changes the prompt"),
    Refused("verbosity", "changes the prompt"),
    Refused("web_search_options", "changes the prompt"),
    Refused("chat_template", "changes the prompt"),
    Refused("chat_template_kwargs", "changes the prompt", ({},)),
    Refused("documents", "changes the prompt", ([],)),
    Refused("continue_final_message", "changes the prompt", (False,)),
    Refused("add_generation_prompt", "changes the prompt", (True,)),
    Refused("add_special_tokens", "changes the prompt", (False,)),
    Refused("echo", "repeats the last message in the answer", (False,)),
    Refused("mm_processor_kwargs", "changes the prompt", ({},)),
    Refused("separate_reasoning", "splits the text", (False,)),
    Refused("include_reasoning", "splits the text", (False,)),
)  # fmt: skip

COMPLETION_FIELDS = FieldTable(
    MODEL, PROMPT, MAX_TOKENS_FIELD, LOGPROBS, BEST_OF,
    *_SAMPLING,
    *_INERT,
    *_REFUSED,
    Refused("max_completion_tokens", "is a chat's name for max_tokens", remedy="use max_tokens"),
    Refused("echo", "repeats the prompt in the answer", (False,)),
    Refused("suffix", "inserts instead of continuing", ("",)),
    Refused("prompt_embeds", "replaces the prompt"),
    Refused("add_special_tokens", "changes the prompt", (True,)),
)  # fmt: skip

TOKENIZE_FIELDS = FieldTable(
    MODEL, TEXT_PROMPT, MESSAGES, ADD_SPECIAL_TOKENS, ADD_GENERATION_PROMPT, RETURN_TOKEN_STRS,
    Refused("tools", "changes the prompt", ([],)),
    Refused("chat_template", "changes the prompt"),
    Refused("chat_template_kwargs", "changes the prompt", ({},)),
    Refused("continue_final_message", "changes the prompt", (False,)),
    Refused("mm_processor_kwargs", "changes the prompt", ({},)),
)  # fmt: skip

DETOKENIZE_FIELDS = FieldTable(MODEL, TOKENS)

STREAM_OPTION_FIELDS = FieldTable(
    _boolean("include_usage", "a last chunk with the usage"),
    Inert("include_obfuscation", checks.boolean, "nothing is padded"),
)

CACHE_FIELDS = FieldTable(INSERT, LOOKUP, PRIORITY)


def listed(tables: Mapping[str, FieldTable]) -> Sequence[tuple[str, str, str, str]]:
    """Rows for the documentation: route, field, what becomes of it, and its meaning."""
    return [
        (route, field.name, type(field).__name__.lower(), field.meaning)
        for route, table in tables.items()
        for field in table.fields.values()
    ]
