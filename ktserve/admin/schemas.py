"""What the admin sockets answer: the shapes of the JSON, for server, client and OpenAPI document.

Counts are of tokens unless a name says otherwise, times are seconds since 1970, ages and durations
are seconds. A namespace is named by its pseudonym (``ns-`` and 16 letters). On ``observe.sock``
tokens are rounded to `OBSERVE_TOKENS`, times to whole seconds, and ``by`` never names a tenant.
A client ignores fields that it does not know: a newer server may have more.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ktserve.cache.reasons import Reason

API_VERSION = 1
"""Grows with a change that an older client cannot follow."""

OBSERVE_TOKENS = 64
"""On ``observe.sock`` token counts are multiples of this and of the page size, rounded down."""

MAX_PAGE = 1000
"""The most rows of one answer; `DEFAULT_PAGE` where the request does not say."""

DEFAULT_PAGE = 100
REVEAL_TOKENS = 256

Role = Literal["admin", "observe"]
Topic = Literal["status", "tenants", "namespaces", "requests", "events", "evictions", "mirror"]
STATE_TOPICS: tuple[Topic, ...] = ("status", "tenants", "namespaces", "requests")
EVENT_TOPICS: tuple[Topic, ...] = ("events", "evictions")

WindowName = Literal["10s", "1m", "5m", "life"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is no success.

    Attributes:
        code: a stable word: ``not_found``, ``invalid``, ``forbidden``, ``gone``, ``stale``,
            ``changed``, ``busy``, ``unavailable``, ``internal``.
        message: names the field, the limit and the remedy.
    """

    code: str
    message: str
    field: str | None = None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/version``.

    Attributes:
        api: `API_VERSION`.
        boot: the life of the engine; None while there is none.
        role: of this connection.
        reveal: whether texts can be revealed here.
    """

    api: int
    version: str
    name: str
    boot: str | None
    pid: int
    started: float
    role: Role
    reveal: bool


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the page pool by state: free + evictable + locked + private = total."""

    total: int
    free: int
    evictable: int
    locked: int
    private: int


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in the last ``seconds``, or since the server started.

    Attributes:
        seconds: that the window really covers; shorter while the server is younger.
        hit_rate: of prompt tokens that were looked up, the part that was found; None for none.
    """

    seconds: float
    lookups: int
    hits: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float | None
    generated_tokens: int
    evicted_tokens: int


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's steps of the last 10 s.

    Attributes:
        overhead: the part of the engine's time that its reports to the admin plane took, 0 to 1.
    """

    count: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    overhead: float


class ChildHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two processes beside the supervisor.

    Attributes:
        state: ``starting``, ``ready``, ``restarting`` (it died and is started again soon).
        pid: None while there is none.
        restarts: since the server started.
        last_death: how the last life ended.
        heard: seconds since it last said something; None for the API, which is asked for nothing.
    """

    role: str
    state: str
    pid: int | None
    restarts: int
    ready_for: float | None
    last_death: str | None
    heard: float | None


class MirrorHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether what is shown is true.

    Attributes:
        state: ``live``; ``stale``: what is shown was true some time ago, and is being rebuilt;
            ``none``: no engine was heard yet.
        why: of ``stale``: ``gap``, ``mismatch``, ``refused``, ``repaired``, ``engine lost``.
        seq: the number of the next record.
        nodes: that are known.
        compared: seconds since a digest agreed; None before the first.
        digests: that were compared.
        covered: of the nodes, how many the digests of the last round have compared, 0 to 1.
        mismatches: that were found. Must be 0.
        gaps: times that records were lost.
        rebuilds: by snapshot.
    """

    state: Literal["live", "stale", "none"]
    why: str | None
    seq: int
    nodes: int
    compared: float | None
    digests: int
    covered: float
    mismatches: int
    gaps: int
    rebuilds: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/status``.

    Attributes:
        admission: ``open``, ``paused``, ``draining``.
        windows: by `WindowName`.
        saved_prefill_tokens: that were found and not computed, since the server started.
        alarms: what needs somebody's eyes, in words; empty when all is well.
        viewers: watches that are open.
    """

    name: str
    version: str
    boot: str | None
    started: float
    model: str | None
    device: str | None
    dtype: str | None
    attention_backend: str | None
    page_size: int | None
    context_length: int | None
    cache_sharing: str
    eviction_policy: str
    url: str | None
    admission: str
    pool: Pool | None
    running: int
    queued: int
    preemptions: int
    invariant_breaches: int
    windows: dict[str, Window]
    saved_prefill_tokens: int
    steps: StepTimes
    tenants: int
    namespaces: int
    children: list[ChildHealth]
    mirror: MirrorHealth
    alarms: list[str]
    viewers: int
    log_level: str


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant.

    Attributes:
        declared: it is in the roster; "@public" holds the public prefixes.
        weight, cache_floor, cache_cap, cache_ttl: its quota, as `ktserve.tenancy.tenant.Quota`.
        changed: the quota was set on the running server and is not the file's.
        floor, cap: what the quota comes to.
        private: of running sequences, in no tree.
        hit_rates: by `WindowName`; None where nothing was looked up.
        evicted: that it lost since the server started.
        caused: that its requests evicted.
        evicted_by: what it lost by evictor; "" is nobody (a flush, a time to live, a limit).
    """

    name: str
    label: str | None
    declared: bool
    weight: float
    cache_floor: float | None
    cache_cap: float | None
    cache_ttl: float | None
    changed: bool
    floor: int
    cap: int
    resident: int
    locked: int
    private: int
    namespaces: int
    nodes: int
    lookups: int
    hits: int
    prompt_tokens: int
    hit_tokens: int
    hit_rates: dict[str, float | None]
    evicted: int
    caused: int
    evicted_by: dict[str, int]
    running: int
    queued: int


class NamespaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace that has a tree.

    Attributes:
        id: its pseudonym.
        salted, extra_key: whether it has a cache_salt, an extra_key; never what.
        roots: ids of its roots: where prompts begin, then those behind public prefixes.
        nodes: without roots.
    """

    id: str
    index: int
    tenant: str
    salted: bool
    extra_key: bool
    adapter: int | None
    roots: list[int]
    resident: int
    locked: int
    nodes: int
    leases: int
    last_used: float
    lookups: int
    hits: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float | None
    evicted: int
    caused: int


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node.

    Attributes:
        parent: None of a root.
        behind: of a root behind a public prefix, that prefix's id.
        tokens: of its edge.
        start: tokens before the edge in its own tree.
        children: how many.
        locks: leases at it or below it.
        hits: lookups that reached it.
        pins: ids of pins that end at it.
    """

    id: int
    namespace: str
    parent: int | None
    behind: int | None
    tokens: int
    start: int
    children: int
    locks: int
    hits: int
    created: float
    last_used: float
    pins: list[int]


class VictimRow(msgspec.Struct, frozen=True, kw_only=True):
    """What goes next of a tenant: the last ``tokens`` of a node."""

    node: int
    namespace: str | None
    tokens: int
    last_used: float | None


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the cache, in words.

    Attributes:
        kind: a `ktserve.cache.records.Kind` in lower case: ``opened``, ``evicted`` …
        reason: a `ktserve.cache.records.Why` in lower case, None for none.
        node, parent: ids as in the record; 0 where there is none.
        namespace, tenant: None where the name is not known any more.
        request: the engine's id, None where for none. Not on observe.sock where it is another
            tenant's.
    """

    seq: int
    time: float
    kind: str
    reason: str | None
    namespace: str | None
    tenant: str | None
    node: int
    parent: int
    tokens: int
    request: int | None


class EvictionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Some tokens that a node lost.

    Attributes:
        by: the tenant whose request took them; None for nobody, or where it is not known any
            more. On observe.sock ``own``, ``other`` or ``system``.
        age: seconds since the tokens were last used.
        hits: lookups that had reached the node.
    """

    seq: int
    time: float
    tenant: str | None
    namespace: str | None
    node: int
    tokens: int
    reason: str
    by: str | None
    request: int | None
    age: float
    hits: int


class EvictionTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens lost since the engine started, for one victim, evictor and reason."""

    tenant: str
    by: str | None
    reason: str
    evictions: int
    tokens: int


class AgeBucket(msgspec.Struct, frozen=True, kw_only=True):
    """How often something was at most ``seconds`` old, and older than the bucket before.

    Attributes:
        seconds: None for all that is older than the last one.
        evicted: tokens by their age when they were evicted.
        hit: lookups by the age of what they found at its end.
    """

    seconds: float | None
    evicted: int
    hit: int


class Evictions(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/evictions``.

    Attributes:
        rows: the newest last.
        gap: rows between ``since`` and the first one that are not held any more.
    """

    boot: str | None
    totals: list[EvictionTotal]
    ages: list[AgeBucket]
    rows: list[EvictionRow]
    next: int
    gap: int


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/events``.

    Attributes:
        next: the seq to ask for next.
        gap: records between ``since`` and the first row that are not held any more.
    """

    boot: str | None
    rows: list[EventRow]
    next: int
    gap: int


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Never its text.

    Attributes:
        id: the engine's; below 0 for those that compute public prefixes.
        answer: the id of the client's answer.
        state: ``queued``, ``running``, ``finished``, ``failed``, ``aborted``.
        reason: why so many tokens were found; in words in ``why``.
        queue_seconds: from arrival to first admission, so far where it still waits.
        first_token_seconds: from arrival.
        total_seconds: from arrival to its end, so far where it runs.
    """

    id: int
    answer: str
    tenant: str
    namespace: str
    state: str
    prompt_tokens: int
    cached_tokens: int | None
    reason: Reason | None
    why: str | None
    generated: int
    max_tokens: int
    preemptions: int
    arrived: float
    queue_seconds: float
    first_token_seconds: float | None
    total_seconds: float
    finish: str | None


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace that holds more of a prompt than the request found."""

    namespace: str
    tokens: int


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/requests/{id}``.

    Attributes:
        sentences: what happened, in words.
        elsewhere: other namespaces of the same tenant with the same adapter; admin.sock and a live
            request only, None otherwise.
        evictions: what its admission and its growth took from others.
    """

    request: RequestView
    sentences: list[str]
    elsewhere: list[Holding] | None
    evictions: list[EvictionTotal]


class PinView(msgspec.Struct, frozen=True, kw_only=True):
    """A pinned prefix; ``node`` is where it ends."""

    id: int
    namespace: str | None
    tenant: str | None
    node: int
    tokens: int


class PublicView(msgspec.Struct, frozen=True, kw_only=True):
    """A public prefix, under the name that the operator gave it."""

    id: int
    name: str
    tokens: int
    readers: int
    computed: bool


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/pins``."""

    pins: list[PinView]
    public: list[PublicView]


# Pages of rows: ``next`` is the cursor of the next page, None at the end.


class Tenants(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/tenants``: sorted by any column, filtered."""

    rows: list[TenantRow]
    total: int
    next: str | None


class Namespaces(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/namespaces``."""

    rows: list[NamespaceRow]
    total: int
    next: str | None


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """Roots, children or a path."""

    rows: list[NodeRow]
    total: int
    next: str | None


class Victims(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/tenants/{name}/victims``."""

    rows: list[VictimRow]


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/requests``: the newest first."""

    rows: list[RequestView]
    total: int
    next: str | None


# Changes: what is sent, and what is answered.


class FlushBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/flush``. Exactly one of the two is given.

    Attributes:
        namespace: a pseudonym.
        all: true.
    """

    namespace: str | None = None
    all: bool = False


class FlushDone(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    freed: tokens.
    """

    freed: int


class QuotaBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``PUT /v1/tenants/{name}/quota``: what is not given stays; null takes a limit away.

    It lasts until the file of tenants is read again or the server ends.
    """

    weight: float | msgspec.UnsetType = msgspec.UNSET
    cache_floor: float | msgspec.UnsetType | None = msgspec.UNSET
    cache_cap: float | msgspec.UnsetType | None = msgspec.UNSET
    cache_ttl: float | msgspec.UnsetType | None = msgspec.UNSET


class PinBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/pins``: the prefix that ends with this node."""

    node: int


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/tenants/reload``.

    Attributes:
        tenants: now.
        added, removed, changed: names.
        warnings: what of the file only a restart can do.
    """

    tenants: int
    added: list[str]
    removed: list[str]
    changed: list[str]
    warnings: list[str]


class AdmissionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``PUT /v1/admission``."""

    paused: bool


class LogLevelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``PUT /v1/log-level``."""

    level: Literal["debug", "info", "warning", "error"]


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A change was made.

    Attributes:
        done: in words.
    """

    done: str


class RevealBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/nodes/{id}/reveal``.

    Attributes:
        reason: 1 to 500 characters, for the audit log.
    """

    reason: str


class Revealed(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a node's first tokens.

    Attributes:
        tokens: in it; ``total`` are in the node.
    """

    text: str
    tokens: int
    total: int


# GET /v1/watch: one of these a line.


class HelloFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag="hello"):
    """The first one."""

    api: int
    version: str
    name: str
    boot: str | None
    role: Role
    topics: list[Topic]
    rate: float


class SnapshotFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag="snapshot"):
    """A state topic as it is; forget what was known of it.

    Attributes:
        rows: of `Status`, `TenantRow`, `NamespaceRow` or `RequestView`.
        last: the snapshot is complete.
    """

    topic: Topic
    boot: str | None
    seq: int
    rows: list[msgspec.Raw]
    last: bool


class DeltaFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag="delta"):
    """Rows of a state topic that changed, whole.

    Attributes:
        gone: keys of rows that are no more: a tenant's name, a namespace's or request's id.
    """

    topic: Topic
    boot: str | None
    seq: int
    rows: list[msgspec.Raw]
    gone: list[str]


class EventsFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag="events"):
    """Rows of an event topic, each once, in order: `EventRow` or `EvictionRow`."""

    topic: Topic
    boot: str | None
    rows: list[msgspec.Raw]


class GapFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag="gap"):
    """Rows of an event topic that this reader was too slow for, or that nobody has.

    Attributes:
        start: seq of the first one lost.
        end: seq of the next row.
    """

    topic: Topic
    boot: str | None
    start: int
    end: int


class MirrorFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag="mirror"):
    """One message of the engine's feed (`ktserve.feed`), for recordings. admin.sock only."""

    message: msgspec.Raw


class MarkFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag="mark"):
    """At least once a second: everything up to ``seq`` was sent.

    Attributes:
        state: the mirror's.
    """

    boot: str | None
    seq: int
    time: float
    state: Literal["live", "stale", "none"]


class RestartedFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag="restarted"):
    """Another life of the engine begins; snapshots of all topics follow."""

    boot: str | None


class ByeFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag="bye"):
    """The last one.

    Attributes:
        why: ``stopping``, ``too_slow``.
    """

    why: str


Frame = (
    HelloFrame
    | SnapshotFrame
    | DeltaFrame
    | EventsFrame
    | GapFrame
    | MirrorFrame
    | MarkFrame
    | RestartedFrame
    | ByeFrame
)
