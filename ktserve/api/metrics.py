"""The Prometheus metrics of one server; no label is text that a client controls.

A tenant's label is its name in the operator's file. "@public" is the account of the public
prefixes, "@system" and "@other" are evictors: '@' is in no tenant's name.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ktserve.api.generation import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of admitted requests"),
    ("cached_tokens", "Prompt tokens that came from the prefix cache"),
    ("generated_tokens", "Generated tokens"),
    ("evicted_tokens", "Tokens evicted from the prefix cache"),
    ("preemptions", "Requests that were preempted"),
    ("invariant_breaches", "Breaches of the cache's invariants"),
)

_TENANT_COUNTERS = (
    ("lookups", "lookups", "Requests that were looked up in the prefix cache"),
    ("lookup_tokens", "prompt_tokens", "Prompt tokens that were looked up in the prefix cache"),
    ("hit_tokens", "hit_tokens", "Prompt tokens that were found in the prefix cache"),
)

_TENANT_GAUGES = (
    ("resident_tokens", "resident", "Tokens in the prefix cache"),
    ("floor_tokens", "floor", "Tokens that no other tenant's request takes"),
    ("cap_tokens", "cap", "The most tokens that the tenant holds"),
    ("namespaces", "namespaces", "Namespaces in the prefix cache"),
)


class Metrics:
    """The metrics, in a registry of their own.

    Args:
        engine: its counters are shown as they come, and begin again with each life of the engine;
            those by tenant go on.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._registry.register(_TenantCollector(engine))
        self._requests = Counter(
            "ktserve_requests",
            "Requests answered, by endpoint and HTTP status",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "ktserve_time_to_first_token_seconds", "From request to first token", _FIRST_TOKEN_S
        )
        self._inter_token = self._histogram(
            "ktserve_inter_token_latency_seconds", "Between two tokens of a text", _INTER_TOKEN_S
        )
        self._whole = self._histogram(
            "ktserve_e2e_request_latency_seconds", "From request to last token", _WHOLE_S
        )

    def answered(self, endpoint: str, status: int) -> None:
        """A request on ``endpoint``, one of the routes' own names, was answered."""
        self._requests.labels(endpoint, str(status)).inc()

    def first_token(self, endpoint: str, seconds: float) -> None:
        """The first token of a request came after ``seconds``."""
        self._first_token.labels(endpoint).observe(seconds)

    def next_tokens(self, endpoint: str, seconds: float, tokens: int) -> None:
        """``tokens`` further tokens of one text came together, ``seconds`` after those before."""
        histogram = self._inter_token.labels(endpoint)
        for _ in range(tokens):
            histogram.observe(seconds / tokens)

    def whole(self, endpoint: str, seconds: float) -> None:
        """A request was answered in full after ``seconds``."""
        self._whole.labels(endpoint).observe(seconds)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, meaning, ("endpoint",), buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "ktserve_engine_up",
            "1 while an engine is ready",
            value=int(self._engine.info is not None),
        )
        stats = self._engine.stats
        if stats is None:
            return
        yield GaugeMetricFamily(
            "ktserve_running_requests", "Sequences in the batch", value=stats.running
        )
        yield GaugeMetricFamily("ktserve_queued_requests", "Requests waiting", value=stats.queued)
        pages = GaugeMetricFamily("ktserve_pages", "Pages of the cache, by state", labels=["state"])
        pages.add_metric(["free"], stats.pages_free)
        pages.add_metric(["evictable"], stats.pages_evictable)
        pages.add_metric(["in_use"], stats.pages_total - stats.pages_free - stats.pages_evictable)
        yield pages
        for name, meaning in _COUNTERS:
            yield CounterMetricFamily(f"ktserve_{name}", meaning, value=getattr(stats, name))


class _TenantCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        tenants = self._engine.tenants
        for name, field, meaning in _TENANT_COUNTERS:
            counter = CounterMetricFamily(f"ktserve_cache_{name}", meaning, labels=["tenant"])
            for tenant, total in tenants.totals.items():
                counter.add_metric([tenant], getattr(total, field))
            yield counter
        evicted = CounterMetricFamily(
            "ktserve_cache_evicted_tokens",
            "Tokens that the victim lost from the prefix cache, by whose request took them",
            labels=["victim", "evictor"],
        )
        for tenant, total in tenants.totals.items():
            for evictor, tokens in total.evicted.items():
                evicted.add_metric([tenant, evictor], tokens)
        yield evicted
        for name, field, meaning in _TENANT_GAUGES:
            gauge = GaugeMetricFamily(f"ktserve_cache_{name}", meaning, labels=["tenant"])
            for tenant, row in tenants.now.items():
                gauge.add_metric([tenant], getattr(row, field))
            yield gauge
