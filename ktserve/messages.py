"""What the processes say to each other: typed structs, MessagePack over ZeroMQ.

`Request` is the one object that describes a request from the HTTP route to the sampler. It is built
once, where the tenant is known, and is then held, never copied field by field into another.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenant import Quota
from ktserve.tenancy.tenants import Roster

FinishReason = Literal["stop", "length"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. The values are in range: routes check them before.

    Attributes:
        max_tokens: the most tokens to generate, at least 1.
        min_tokens: before this many tokens no end-of-sequence or stop id can be chosen.
        temperature: 0 is greedy.
        top_k: 0 is off.
        logit_bias: token id to bias, added to its logit.
        seed: of the random draws, which depend on it and on the count of tokens alone, so that a
            request draws the same whatever else is in the batch; None draws one.
        stop_token_ids: these end the sequence, besides the model's own end-of-sequence ids.
        ignore_eos: the model's own end-of-sequence ids do not end it.
        logprobs: how many alternatives to report for each token; 0 reports the chosen token's
            log-probability alone, None reports nothing.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request uses the prefix cache.

    Attributes:
        insert: what it computes is kept for later ones of its namespace.
        lookup: it starts from what is kept.
        priority: 0 to 100, for the eviction policy of that name: what it uses goes later.
    """

    insert: bool = True
    lookup: bool = True
    priority: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One prompt to complete once.

    Attributes:
        request_id: unique within one life of the API process.
        namespace: under which its prefix is looked up and kept. Required, here and everywhere.
        prompt: token ids as bytes, see `ktserve.tokens`; at least one token.
        answer: the id under which the client gets the answer, for operators; a batch's prompts and
            the choices of one prompt share it.
    """

    request_id: int
    namespace: Namespace
    prompt: bytes
    sampling: SamplingParams
    cache: CacheOptions = CacheOptions()
    answer: str = ""

    def __repr__(self) -> str:
        return f"Request(request_id={self.request_id}, prompt={len(self.prompt)} bytes, ...)"


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """The client is gone, or has what it asked for: end the request. Unknown ids are ignored."""

    request_id: int


class PublicPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="public_prefix"):
    """A prefix that the operator made public; to be computed, kept, and read by ``tenants``.

    Attributes:
        name: another one of the same name takes its place.
        prompt: token ids as bytes.
    """

    name: str
    tenants: tuple[str, ...]
    prompt: bytes


class PublicNames(msgspec.Struct, frozen=True, kw_only=True, tag="public_names"):
    """The names of all public prefixes there are; any other is withdrawn."""

    names: tuple[str, ...]


ToEngine = Request | Abort | PublicPrefix | PublicNames


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one generated position, natural logarithm, of the model's own
    distribution: before bias, penalties, temperature and truncation.

    Attributes:
        logprob: the chosen token's.
        top: the most likely tokens and theirs, most likely first.
    """

    logprob: float
    top: list[tuple[int, float]]


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, tag="tokens", omit_defaults=True):
    """What one step gave one request.

    Attributes:
        token_ids: the new tokens, in order. A token that ended the sequence is among them.
        cached_tokens: on the request's first output alone: the prompt tokens that came from the
            cache, counted once, at first admission.
        logprobs: one for each of ``token_ids``, where asked for.
        finish: why the sequence ended, on its last output.
        stopped_by_token: with finish "stop": the last of ``token_ids`` is a stop or
            end-of-sequence token and not part of the text.
    """

    request_id: int
    token_ids: list[int]
    cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stopped_by_token: bool = False


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", omit_defaults=True):
    """The request ends without (more) tokens.

    Attributes:
        status: the HTTP status that says so: 400, 429, 500 or 503.
        code: a stable word for programs, for example ``queue_full``.
        message: for people; holds no prompt, key or salt.
        retry_after: seconds after which another try makes sense.
    """

    request_id: int
    status: int
    code: str
    message: str
    retry_after: int | None = None


MAX_EVICTION_PAIRS = 1000
"""Of the pairs of one tenant that lost tokens and another that took them, so many are told apart:
the first that happen. With up to 32 tenants that is all of them."""


class TenantCache(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tenant's part of the cache: counters since the engine started and gauges of now.

    Attributes:
        name: the tenant's; "@public" holds the public prefixes.
        resident: tokens in its trees.
        locked: those of them that something runs on or pins.
        private: tokens' worth of pages of its running sequences that are in no tree (yet).
        floor: tokens that no other tenant's request takes from it.
        cap: the most tokens that it holds.
        namespaces: that exist.
        nodes: of their trees, without roots.
        lookups: requests that were looked up.
        hits: those that found something.
        prompt_tokens: tokens that they asked for.
        hit_tokens: tokens that they found, in a public prefix too.
        evicted: tokens that it lost.
        caused: tokens that its requests evicted, its own among them.
        evicted_by: tokens that it lost, by the tenant whose request took them: its own name, ""
            for no request (a limit, a time to live, a flush), and the others that are told apart.
            What the rest of them took is what is missing to ``evicted``.
    """

    name: str
    resident: int
    locked: int
    private: int
    floor: int
    cap: int
    namespaces: int
    nodes: int
    lookups: int
    hits: int
    prompt_tokens: int
    hit_tokens: int
    evicted: int
    caused: int
    evicted_by: dict[str, int]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Counters since the engine started and gauges of now; pages in pages, tokens in tokens.

    Attributes:
        tenants: those that changed since they were last told, a few times a second and whenever
            the engine falls idle; all of them where the API process is a new one.
    """

    running: int
    queued: int
    pages_total: int
    pages_free: int
    pages_evictable: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    evicted_tokens: int
    preemptions: int
    invariant_breaches: int
    tenants: tuple[TenantCache, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Everything one engine step has to say to the API process, in one message."""

    outputs: list[TokenOutput | RequestFailed]
    stats: EngineStats


FromEngine = StepOutput


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the API process must know of a ready engine to check requests before sending them.

    Attributes:
        model: what was loaded, for people: the name of a directory, file or hub model.
        architecture: the model class's name, for example ``LlamaForCausalLM``.
        dtype: the precision in words, of the weights too where theirs is another.
        context_length: the most tokens of one sequence, prompt and output together.
        pool_tokens: tokens that the page pool holds; no sequence can be longer.
        capacity_tokens: by tenant, the most tokens that one of its sequences can get of the pool,
            whatever the others keep.
        vocab_size: ids below it are valid in a prompt.
        weight_bytes: bytes of weights on the device.
        eos_token_ids: the ids that end a sequence.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    attention_backend: str
    context_length: int
    page_size: int
    pool_tokens: int
    capacity_tokens: dict[str, int]
    kv_bytes_per_token: int
    weight_bytes: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_running_requests: int
    max_queued_requests: int


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A child's first word to the supervisor."""

    role: Literal["engine", "api"]
    pid: int


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="engine_ready"):
    """From the engine to the supervisor, and from there to the API: requests can be sent.

    Attributes:
        boot: a random id of this life of the engine.
        endpoint: the ZeroMQ address on which it takes requests; another one in each life, so that
            nothing meant for a dead engine can reach the next.
    """

    boot: str
    endpoint: str
    info: EngineInfo


class EngineLost(msgspec.Struct, frozen=True, kw_only=True, tag="engine_lost"):
    """From the supervisor to the API: the engine with this boot id is gone; fail what it held."""

    boot: str
    reason: str


class ApiReady(msgspec.Struct, frozen=True, kw_only=True, tag="api_ready"):
    """From the API to the supervisor: the HTTP socket listens on this URL."""

    url: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="child_failed"):
    """A child's last word: it cannot start or go on, and a restart would not mend it."""

    message: str


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """From the supervisor to the API: take no new requests; say Drained when none is in flight."""


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """From the API to the supervisor: nothing is in flight any more."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """From the supervisor to a child: end now."""


# What an operator wants done. Each has an id, and its answer the same one.


class Flush(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """To the engine: forget what no lease covers. Answer: `Flushed`.

    Attributes:
        namespaces: the indices of trees; None is all of them.
    """

    id: int
    namespaces: tuple[int, ...] | None


class SetQuotas(msgspec.Struct, frozen=True, kw_only=True, tag="set_quotas"):
    """To the engine: divide the pool anew among all tenants. Answer: `QuotasSet`."""

    id: int
    quotas: dict[str, Quota]


class PinPath(msgspec.Struct, frozen=True, kw_only=True, tag="pin_path"):
    """To the engine: keep a prefix from eviction. Answer: `Pinned`.

    Attributes:
        namespace: the index of its tree.
        nodes: ids from the root, itself included, to where the prefix ends.
    """

    id: int
    namespace: int
    nodes: tuple[int, ...]


class Unpin(msgspec.Struct, frozen=True, kw_only=True, tag="unpin"):
    """To the engine: let a pinned prefix go. Answer: `Done`."""

    id: int
    pin: int


class ListVictims(msgspec.Struct, frozen=True, kw_only=True, tag="list_victims"):
    """To the engine: what would go next. Answer: `VictimList`.

    Attributes:
        tenant: whose nodes, in their order.
        most: entries.
    """

    id: int
    tenant: str
    most: int


class ReadTokens(msgspec.Struct, frozen=True, kw_only=True, tag="read_tokens"):
    """To the engine, which refuses it unless started with --admin-reveal: the tokens of one edge.
    Answer: `NodeTokens`.

    Attributes:
        namespace: the index of its tree.
        nodes: ids from the root, itself included, to the node.
        most: tokens, of the edge's first ones.
    """

    id: int
    namespace: int
    nodes: tuple[int, ...]
    most: int


class Elsewhere(msgspec.Struct, frozen=True, kw_only=True, tag="elsewhere"):
    """To the engine: which other namespaces of its own tenant hold more of a live request's prompt
    than it found. Answer: `ElsewhereFound`."""

    id: int
    request_id: int


class TakeSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="take_snapshot"):
    """To the engine: the mirror needs to know anew how things are. No answer but the snapshot."""


class SetLogLevel(msgspec.Struct, frozen=True, kw_only=True, tag="set_log_level"):
    """To either child. Answer: `Done`."""

    id: int
    level: Literal["debug", "info", "warning", "error"]


class SetAdmission(msgspec.Struct, frozen=True, kw_only=True, tag="set_admission"):
    """To the API: let new requests in, or refuse them with 503. Answer: `Done`."""

    id: int
    paused: bool


class Detokenize(msgspec.Struct, frozen=True, kw_only=True, tag="detokenize"):
    """To the API: the text of ``tokens`` (packed ids). Answer: `Text`."""

    id: int
    tokens: bytes

    def __repr__(self) -> str:
        return f"Detokenize(id={self.id}, ...)"


class TenantsChanged(msgspec.Struct, frozen=True, kw_only=True, tag="tenants_changed"):
    """To the API: who may use the server from now on. Answer: `Done`, or `Refused` and no change.

    Attributes:
        capacity_tokens: as in `EngineInfo`, after the change.
    """

    id: int
    roster: Roster
    capacity_tokens: dict[str, int]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """It was done."""

    id: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """It was not done, and nothing has changed.

    Attributes:
        code: a stable word: ``changed`` (the tree is not as the sender thinks; look again),
            ``not_found``, ``invalid``, ``forbidden``.
        message: for people.
    """

    id: int
    code: str
    message: str


class Flushed(msgspec.Struct, frozen=True, kw_only=True, tag="flushed"):
    """Attributes:
    tokens: that were freed.
    """

    id: int
    tokens: int


class QuotasSet(msgspec.Struct, frozen=True, kw_only=True, tag="quotas_set"):
    """Attributes:
    capacity_tokens: as in `EngineInfo`.
    """

    id: int
    capacity_tokens: dict[str, int]


class Pinned(msgspec.Struct, frozen=True, kw_only=True, tag="pinned"):
    """Attributes:
    tokens: that the pin keeps.
    """

    id: int
    pin: int
    tokens: int


class VictimList(msgspec.Struct, frozen=True, kw_only=True, tag="victims"):
    """Attributes:
    victims: (node, namespace's index, tokens), the next one first.
    """

    id: int
    victims: list[tuple[int, int, int]]


class NodeTokens(msgspec.Struct, frozen=True, kw_only=True, tag="node_tokens"):
    """Attributes:
    tokens: packed ids.
    """

    id: int
    tokens: bytes

    def __repr__(self) -> str:
        return f"NodeTokens(id={self.id}, ...)"


class ElsewhereFound(msgspec.Struct, frozen=True, kw_only=True, tag="elsewhere_found"):
    """Attributes:
    found: (namespace's index, tokens held), the furthest first.
    """

    id: int
    found: list[tuple[int, int]]


class Text(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """Attributes:
    text: what a client's prompt says; cleaned by whoever shows it.
    """

    id: int
    text: str

    def __repr__(self) -> str:
        return f"Text(id={self.id}, ...)"


EngineCommand = (
    Flush | SetQuotas | PinPath | Unpin | ListVictims | ReadTokens | Elsewhere | SetLogLevel
)
ApiCommand = SetLogLevel | SetAdmission | Detokenize | TenantsChanged
Reply = (
    Done | Refused | Flushed | QuotasSet | Pinned | VictimList | NodeTokens | ElsewhereFound | Text
)

ToSupervisor = Hello | EngineReady | ApiReady | Failed | Drained | Reply
FromSupervisor = EngineReady | EngineLost | Drain | Stop | TakeSnapshot | EngineCommand | ApiCommand
