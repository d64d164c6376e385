"""What the records say of evictions, and what the ring does when nobody reads it."""

from __future__ import annotations

from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.cache.records import Kind, Records, Why
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack


def namespace(tenant: str) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=None, extra_key=None, adapter=None)


def serve(cache: CacheManager, tenant: str, tokens: list[int], request: int) -> None:
    table = cache.open(namespace(tenant), pack(tokens), request=request)
    assert cache.grow(table, len(tokens))
    cache.close(table, pack(tokens))


def test_an_eviction_says_what_was_lost_why_and_for_which_request() -> None:
    records = Records()
    quotas = {"a": Quota(), "b": Quota()}
    cache = CacheManager(PagePool(8), 1, sharing="shared", quotas=quotas, records=records)
    serve(cache, "a", [1, 2, 3, 4, 5, 6], request=11)
    leaf = next(iter(next(iter(cache.forest.trees())).walk()))
    serve(cache, "b", [1, 2, 3], request=12)
    serve(cache, "a", [7, 8], request=13)
    cache.flush(namespace("b"))
    evicted = [one for one in records.since(0)[0] if one.kind == Kind.EVICTED]
    assert [(one.tokens, one.reason, one.request) for one in evicted] == [
        (1, Why.OTHER, 12),
        (2, Why.OWN, 13),
        (3, Why.FLUSHED, 0),
    ]
    assert [one.node for one in evicted[:2]] == [leaf.id, leaf.id]
    assert cache.accounts.of("a").evicted_by == {"a": 2, "b": 1}
    assert cache.accounts.of("b").evicted_by == {"": 3}


def test_a_reader_that_is_too_slow_is_told_how_many_records_it_lost() -> None:
    records = Records(capacity=10)
    for number in range(25):
        records.emit(Kind.LEASED, number, 0, 1, 0, Why.LOOKUP, 0, number)
    held, lost = records.since(3)
    assert [one.seq for one in held] == list(range(15, 25))
    assert lost == 12
    assert records.since(20) == (held[5:], 0)
    assert records.since(25) == ([], 0)
    assert records.next_seq == 25
