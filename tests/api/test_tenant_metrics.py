"""The cache's counters by tenant on /metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rosters import with_keys

from ktserve.api.tenant_totals import TenantTotals
from ktserve.messages import TenantCache
from ktserve.tenancy.tenants import Tenant

Call = Callable[..., httpx.Response]
Sample = tuple[str, frozenset[tuple[str, str]]]
HOSTILE = ('"} 1 evil{x="', "tenant-b", "\\n# TYPE red", "日本", "y" * 200)


def row(name: str, **counts: Any) -> TenantCache:
    names = (field for field in TenantCache.__struct_fields__ if field != "name")
    return TenantCache(name=name, **{**dict.fromkeys(names, 0), "evicted_by": {}, **counts})


def samples(response: httpx.Response) -> dict[Sample, float]:
    """The samples of the cache by tenant; each name and its labels come once."""
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            if sample.name.startswith("ktserve_cache_"):
                found[key] = sample.value
    return found


def of(name: str, **labels: str) -> Sample:
    return (f"ktserve_cache_{name}", frozenset(labels.items()))


@pytest.fixture
def scrape(lab: Any, call: Call) -> tuple[TenantTotals, Callable[[], Any]]:
    """What the engine tells goes in; gives what /metrics shows of the tenants."""
    engine = lab.says("Hi")
    app = lab.app(engine, enable_metrics=True)
    return engine.tenants, lambda: samples(call(app, "GET", "/metrics"))


def test_every_tenant_has_its_counters_and_gauges(scrape: Any) -> None:
    tenants, shown = scrape
    a = row(
        "a",
        resident=16,
        floor=40,
        cap=80,
        namespaces=3,
        lookups=2,
        prompt_tokens=82,
        hit_tokens=40,
        evicted=47,
        evicted_by={"b": 24, "": 16, "a": 7},
    )
    tenants.add([a, row("@public", resident=12)])
    public = dict.fromkeys(
        (
            of(name, tenant="@public")
            for name in (
                "lookups_total",
                "lookup_tokens_total",
                "hit_tokens_total",
                "floor_tokens",
                "cap_tokens",
                "namespaces",
            )
        ),
        0.0,
    )
    assert shown() == {
        of("lookups_total", tenant="a"): 2,
        of("lookup_tokens_total", tenant="a"): 82,
        of("hit_tokens_total", tenant="a"): 40,
        of("resident_tokens", tenant="a"): 16,
        of("floor_tokens", tenant="a"): 40,
        of("cap_tokens", tenant="a"): 80,
        of("namespaces", tenant="a"): 3,
        of("evicted_tokens_total", victim="a", evictor="a"): 7,
        of("evicted_tokens_total", victim="a", evictor="b"): 24,
        of("evicted_tokens_total", victim="a", evictor="@system"): 16,
        of("resident_tokens", tenant="@public"): 12,
        **public,
    }


def test_counters_go_on_over_an_engines_restart_and_gauges_go_with_it(scrape: Any) -> None:
    tenants, shown = scrape
    counts = {"lookups": 5, "prompt_tokens": 500, "hit_tokens": 100, "resident": 64}
    tenants.add([row("a", evicted=30, evicted_by={"b": 20, "a": 10}, **counts)])
    first = shown()
    tenants.add([row("a", evicted=34, evicted_by={"b": 24, "a": 10}, **counts)])
    before = shown()
    assert before[of("evicted_tokens_total", victim="a", evictor="b")] == 24
    tenants.engine_lost()
    between = shown()
    assert of("resident_tokens", tenant="a") not in between
    tenants.add([row("a", lookups=1, prompt_tokens=50, evicted=4, evicted_by={"b": 4})])
    after = shown()
    for key in before:
        if key[0].endswith("_total"):
            assert first[key] <= before[key] == between[key] <= after[key]
    assert after[of("lookups_total", tenant="a")] == 6
    assert after[of("lookup_tokens_total", tenant="a")] == 550
    assert after[of("hit_tokens_total", tenant="a")] == 100
    assert after[of("evicted_tokens_total", victim="a", evictor="b")] == 28
    assert after[of("evicted_tokens_total", victim="a", evictor="a")] == 10
    assert after[of("resident_tokens", tenant="a")] == 0


def test_tenants_named_like_the_words_for_no_tenant_stay_apart(scrape: Any) -> None:
    tenants, shown = scrape
    by = {"system": 1, "": 2, "public": 4, "@public": 8, "other": 16}
    tenants.add([row("a", evicted=63, evicted_by=by), row("public"), row("@public")])
    evicted = {
        dict(labels)["evictor"]: value
        for (name, labels), value in shown().items()
        if name == "ktserve_cache_evicted_tokens_total"
    }
    assert evicted == {
        "system": 1,
        "@system": 2,
        "public": 4,
        "@public": 8,
        "other": 16,
        "@other": 32,
    }


def test_pairs_beyond_the_bound_are_one_series_for_each_victim() -> None:
    tenants = TenantTotals(max_pairs=2)
    tenants.add([row("a", evicted=9, evicted_by={"b": 1, "c": 2, "d": 4, "a": 2})])
    assert tenants.totals["a"].evicted == {"b": 1, "c": 2, "a": 2, "@other": 4}
    tenants.engine_lost()
    # The next engine tells other pairs apart first.
    tenants.add([row("a", evicted=20, evicted_by={"d": 4, "b": 6, "": 3})])
    assert tenants.totals["a"].evicted == {"b": 7, "c": 2, "a": 2, "@other": 15, "@system": 3}
    tenants.add([row("e", evicted=5, evicted_by={"a": 5})])
    assert tenants.totals["e"].evicted == {"@other": 5}


def test_what_a_client_sends_never_becomes_a_label(lab: Any, call: Call) -> None:
    names = ("acme", "tenant-a")
    tenants = with_keys(*((Tenant(name), [f"key-of-{name}"]) for name in names))
    engine = lab.says("Hi")
    answer = engine.script

    def script(request: Any) -> Any:
        # As the engine does: a row for whom the namespace names.
        engine.tenants.add([row(request.namespace.tenant, lookups=len(engine.requests))])
        return answer(request)

    engine.script = script
    app = lab.app(engine, tenants, enable_metrics=True)
    for place, text in enumerate(HOSTILE):
        body = {
            "messages": [{"role": "user", "content": text}],
            "cache_salt": text,
            "extra_key": text,
            "user": text,
        }
        key = f"key-of-{names[place % 2]}"
        headers = {"Authorization": f"Bearer {key}", "X-Tenant": "tenant-b"}
        response = call(app, "POST", "/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
    assert {request.namespace.cache_salt for request in engine.requests} == set(HOSTILE)
    response = call(app, "GET", "/metrics")
    labels = {value for _, found in samples(response) for _, value in found}
    assert labels == set(names)
    for text in HOSTILE:
        assert text not in response.text
    assert not re.search("evil|TYPE red|key-of", response.text)
