"""What the engine tells of each tenant's part of the cache, and when."""

from __future__ import annotations

import msgspec

from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.engine.tenant_stats import TOLD_EVERY_S, TenantStats
from ktserve.messages import Abort, TenantCache
from ktserve.tenancy.tenant import Quota

PAGE = 4
HOSTILE = ('"} 1 evil{x="', "../../etc", "tenant-b", "日本", "x" * 400)


def prompt(first: int, length: int) -> list[int]:
    return [1 + (first + place) % 255 for place in range(length)]


def small(harness, *, pages=20, clock=lambda: 0.0, sharing="shared", **quotas):
    quotas = quotas or {"a": Quota(), "b": Quota()}
    return harness(
        cache_options={"sharing": sharing, "quotas": quotas},
        page_size=PAGE,
        pages=pages,
        clock=clock,
    )


def newest(run) -> dict[str, TenantCache]:
    return {row.name: row for rows in run.told for row in rows}


def ask(run, tokens, context) -> None:
    run.send(tokens, context, max_tokens=1)
    run.finish()


def test_the_counts_of_a_known_workload_are_told_in_tokens(harness, namespace):
    run = small(harness)
    a, b = namespace(tenant="a", salt="s"), namespace(tenant="b")
    ask(run, prompt(0, 41), a)
    ask(run, prompt(0, 41), a)  # finds its 10 pages
    ask(run, prompt(100, 61), b)  # needs 16 pages, 10 are free: takes 6
    none = dict.fromkeys(("locked", "private", "floor"), 0)
    assert newest(run) == {
        "a": TenantCache(
            name="a",
            resident=16,
            cap=80,
            namespaces=1,
            nodes=1,
            lookups=2,
            hits=1,
            prompt_tokens=82,
            hit_tokens=40,
            evicted=24,
            caused=0,
            evicted_by={"b": 24},
            **none,
        ),
        "b": TenantCache(
            name="b",
            resident=60,
            cap=80,
            namespaces=1,
            nodes=1,
            lookups=1,
            hits=0,
            prompt_tokens=61,
            hit_tokens=0,
            evicted=0,
            caused=24,
            evicted_by={},
            **none,
        ),
    }
    run.cache.flush(a)
    run.engine.receive(Abort(request_id=0))
    run.step()
    flushed = newest(run)["a"]
    assert (flushed.resident, flushed.namespaces) == (0, 0)
    assert (flushed.evicted, flushed.evicted_by) == (40, {"b": 24, "": 16})


def test_shares_are_told_in_tokens(harness, namespace):
    quotas = {"a": Quota(cache_floor=0.3, cache_cap=0.5), "b": Quota()}
    run = small(harness, pages=100, sharing="floors", **quotas)
    ask(run, prompt(0, 9), namespace(tenant="a"))
    told = newest(run)["a"]
    assert (told.floor, told.cap) == (30 * PAGE, 50 * PAGE)


def test_what_a_running_sequence_holds_is_told_as_locked_and_private(harness, namespace):
    run = small(harness, pages=40)
    run.send(prompt(0, 41), namespace(tenant="a"), max_tokens=20, ignore_eos=True)
    run.step()
    told = newest(run)["a"]
    assert told.resident + told.private >= 41
    assert told.locked == told.resident
    run.finish()
    ended = newest(run)["a"]
    assert (ended.locked, ended.private) == (0, 0)
    assert ended.resident == 60


def test_a_busy_engine_tells_its_tenants_twice_a_second_and_an_idle_one_its_last(
    harness, namespace
):
    now = [0.0]
    run = small(harness, pages=100, clock=lambda: now[0])
    run.send(prompt(0, 41), namespace(tenant="a"), max_tokens=20, ignore_eos=True)
    while run.engine.busy:
        run.step()
        now[0] += TOLD_EVERY_S / 8  # it grows by a page every 4 steps
    told = [place for place, rows in enumerate(run.told) if rows]
    assert len(run.told) == 20
    assert told == [0, 8, 16, 19]  # the last between two times
    account = run.cache.accounts.of("a")
    assert newest(run)["a"].resident == account.resident * PAGE


def test_only_tenants_that_changed_are_told(harness, namespace):
    run = small(harness, pages=100)
    a, b = namespace(tenant="a"), namespace(tenant="b")
    ask(run, prompt(0, 9), a)
    ask(run, prompt(0, 9), b)
    assert [row.name for row in run.told[-1]] == ["b"]
    run.cache.set_quotas({"a": Quota(cache_cap=0.5), "b": Quota()})
    run.engine.receive(Abort(request_id=0))
    run.step()
    assert [row.name for row in run.told[-1]] == ["a"]
    run.engine.receive(Abort(request_id=0))
    run.step()
    assert run.told[-1] == ()


def test_a_new_api_process_is_told_of_every_tenant(harness, namespace):
    run = small(harness, pages=100)
    for tenant in "ab":
        ask(run, prompt(0, 9), namespace(tenant=tenant))
    run.engine.abort_all()
    run.step()
    assert [row.name for row in run.told[-1]] == ["a", "b"]


def test_no_salt_and_no_key_of_a_namespace_is_told(harness, namespace):
    run = small(harness, pages=400)
    for text in HOSTILE:
        ask(run, prompt(0, 9), namespace(tenant="a", salt=text, key=text))
    assert set(newest(run)) == {"a"}
    assert newest(run)["a"].namespaces == len(HOSTILE)
    told = msgspec.msgpack.encode(run.told)
    assert b"lookups" not in told  # rows are told without names of fields
    for text in HOSTILE:
        assert text.encode() not in told


def test_a_bound_of_pairs_leaves_own_and_system_evictions_told_apart():
    cache = CacheManager(
        PagePool(100), PAGE, quotas={name: Quota() for name in "vwxyz"}, sharing="shared"
    )
    stats = TenantStats(cache, lambda: 0.0, max_pairs=2)
    victim, second = cache.accounts.of("v"), cache.accounts.of("w")

    def lose(account, evictor, pages) -> None:
        account.evicted += pages
        account.evicted_by[evictor] += pages

    lose(victim, "x", 1)
    assert _by(stats) == {"v": {"x": 4}, "w": {}}
    for evictor in ("v", "", "y", "z"):
        lose(victim, evictor, 2)
    lose(second, "x", 1)
    lose(second, "w", 1)
    told = _by(stats)
    assert told == {"v": {"v": 8, "": 8, "x": 4, "y": 8}, "w": {"w": 4}}
    lose(victim, "z", 1)
    lose(victim, "x", 1)
    told = {row.name: row for row in stats.changed(idle=True)}
    assert told["v"].evicted_by == {"v": 8, "": 8, "x": 8, "y": 8}
    assert told["v"].evicted == 44  # 12 of them by z


def _by(stats: TenantStats) -> dict[str, dict[str, int]]:
    return {row.name: row.evicted_by for row in stats.changed(idle=True)}
