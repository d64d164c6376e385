"""The engine with tenants that share a pool: modes, pins, public prefixes, options of a request."""

from __future__ import annotations

import logging
import random

import pytest

from ktserve.messages import Abort, CacheOptions, PublicPrefix, RequestFailed
from ktserve.tenancy.tenant import Quota
from ktserve.tenancy.tenants_file import MAX_TTL
from ktserve.tokens import pack

SHARING = ("shared", "floors", "partitioned")


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 256) for _ in range(length)]


def tenants(*names: str, sharing: str = "floors", **quotas: Quota) -> dict[str, object]:
    return {"sharing": sharing, "quotas": {name: quotas.get(name, Quota()) for name in names}}


def flood(run, context, *, count: int, first_seed: int) -> None:
    for index in range(count):
        run.send(prompt(first_seed + index, 40), context, max_tokens=1)
        run.finish()


@pytest.mark.parametrize(("sharing", "kept"), [("shared", 0), ("floors", 39), ("partitioned", 39)])
def test_a_flood_takes_a_quiet_tenants_prefix_only_where_nothing_is_kept_for_it(
    harness, namespace, sharing, kept
):
    run = harness(cache_options=tenants("quiet", "noisy", sharing=sharing), pages=200)
    quiet = namespace(tenant="quiet")
    run.send(prompt(1, 40), quiet, max_tokens=1)
    run.finish()
    flood(run, namespace(tenant="noisy"), count=20, first_seed=100)
    again = run.send(prompt(1, 40), quiet, max_tokens=1)
    run.finish()
    assert run.cached[again] == kept
    assert (run.cache.accounts.of("quiet").evicted_by["noisy"] > 0) == (kept == 0)
    run.audit()


def test_in_a_partitioned_pool_one_tenants_queue_holds_nobody_up(harness, namespace):
    run = harness(
        cache_options=tenants("busy", "other", sharing="partitioned"),
        pages=200,
        prefill_tokens=500,
        max_batched_tokens=600,
    )
    busy = [
        run.send(prompt(n, 40), namespace(tenant="busy"), max_tokens=30, ignore_eos=True)
        for n in range(6)
    ]
    other = run.send(prompt(50, 40), namespace(tenant="other"), max_tokens=2, ignore_eos=True)
    run.step()
    assert run.scheduler.waiting  # not all of busy's 100 pages' worth can run
    assert other in run.tokens
    run.finish()
    assert all(len(run.tokens[one]) == 30 for one in busy)
    run.audit()


def test_in_a_partitioned_pool_one_tenants_growth_preempts_its_own_sequences_alone(
    harness, namespace
):
    run = harness(cache_options=tenants("busy", "other", sharing="partitioned"), pages=200)
    for n in range(3):
        run.send(prompt(n, 20), namespace(tenant="busy"), max_tokens=60, ignore_eos=True)
    other = run.send(prompt(9, 20), namespace(tenant="other"), max_tokens=60, ignore_eos=True)
    preempted: set[str] = set()
    while run.engine.busy:
        run.step()
        run.audit()
        preempted |= {
            one.request.namespace.tenant for one in run.scheduler.waiting if one.preemptions
        }
    assert preempted == {"busy"}
    assert len(run.tokens[other]) == 60


@pytest.mark.parametrize("sharing", SHARING)
def test_random_lives_of_three_tenants_harm_nobody(harness, reference, namespace, sharing):
    quotas = tenants("a", "b", "c", sharing=sharing, a=Quota(weight=2), c=Quota(cache_cap=0.6))
    run = harness(cache_options={**quotas, "pin_budget": 0.2}, pages=240, max_running=6)
    draw = random.Random(SHARING.index(sharing))
    starts = [prompt(200 + n, 20) for n in range(5)]
    sent: dict[int, tuple[list[int], int]] = {}
    aborted: set[int] = set()
    to_send = 150
    while to_send or run.engine.busy:
        if to_send and draw.random() < 0.5:
            to_send -= 1
            tokens = draw.choice(starts)[: draw.randrange(4, 21)] + prompt(draw.randrange(8), 6)
            context = namespace(tenant=draw.choice("aabc"), salt=draw.choice([None, "s"]))
            options = CacheOptions(insert=draw.random() < 0.8, lookup=draw.random() < 0.9)
            count = draw.randrange(1, 30)
            sent[run.send(tokens, context, options, max_tokens=count)] = (tokens, count)
        if draw.random() < 0.05 and (alive := [one for one in sent if one not in run.ended]):
            aborted.add(victim := draw.choice(alive))
            run.engine.receive(Abort(request_id=victim))
        if draw.random() < 0.05:
            pins = list(run.cache.kept.pins.values())
            trees = list(run.cache.forest.trees())
            if pins and draw.random() < 0.5:
                run.cache.unpin(pins[0].id)
            elif trees and not pins:
                tree = draw.choice(trees)
                start = pack(draw.choice(starts))
                if run.cache.forest.peek(tree.namespace, start, 20)[0]:
                    run.cache.pin(tree.namespace, start)
        run.step()
        run.audit()
        for account in run.cache.accounts:
            assert account.held <= account.share.cap
    assert run.cache.accounts.evicted > 0
    for request_id, (tokens, count) in sent.items():
        expected = reference.greedy(tokens, count)
        got = run.tokens.get(request_id, [])
        assert got == (expected[: len(got)] if request_id in aborted else expected)


def test_what_a_tenants_part_can_never_hold_is_refused_with_the_numbers(harness, namespace):
    run = harness(cache_options=tenants("a", "b", sharing="partitioned"), pages=100)
    fits = run.send(prompt(1, 20), namespace(tenant="a"), max_tokens=30, ignore_eos=True)
    long = run.send(prompt(1, 20), namespace(tenant="a"), max_tokens=31, ignore_eos=True)
    run.finish()
    assert len(run.tokens[fits]) == 30
    refusal = run.ended[long]
    assert isinstance(refusal, RequestFailed)
    assert (refusal.status, refusal.code) == (400, "exceeds_pool")
    assert "50 tokens" in refusal.message


def test_a_request_whose_tenants_part_shrinks_ends_with_an_error(harness, namespace):
    run = harness(cache_options=tenants("a", "b", sharing="partitioned"), pages=100)
    ids = [
        run.send(prompt(n, 20), namespace(tenant="a"), max_tokens=25, ignore_eos=True)
        for n in range(3)
    ]
    run.step()
    run.cache.set_quotas({"a": Quota(weight=1), "b": Quota(weight=4)})  # a has 20 pages now
    run.finish()
    run.audit()
    for one in ids:
        assert isinstance(run.ended[one], RequestFailed)
        assert "20 tokens" in run.ended[one].message
    fits = run.send(prompt(9, 10), namespace(tenant="a"), max_tokens=10, ignore_eos=True)
    run.finish()
    assert len(run.tokens[fits]) == 10


def test_a_pin_outlives_a_flood_and_gives_way_only_to_what_could_not_run_beside_it(
    harness, reference, namespace, caplog
):
    run = harness(cache_options=tenants("t"), pages=200)
    context = namespace()
    pinned = prompt(1, 20)
    run.send(pinned, context, max_tokens=1)
    run.finish()
    run.cache.pin(context, pack(pinned))
    flood(run, context, count=20, first_seed=100)
    warm = run.send(pinned, context, max_tokens=1)
    run.finish()
    assert run.cached[warm] == 19
    with caplog.at_level(logging.WARNING, "ktserve.cache"):
        whole_pool = run.send(prompt(2, 150), context, max_tokens=50, ignore_eos=True)
        run.finish()
    expected = reference.greedy(prompt(2, 150), 50)
    assert run.tokens[whole_pool][: len(expected)] == expected
    assert len(run.tokens[whole_pool]) == 50
    assert not run.cache.kept.pins.values()
    assert "gives way" in caplog.text
    run.audit()


def test_without_insertion_a_prompt_computed_in_chunks_leaves_nothing(harness, reference):
    run = harness(pages=400, prefill_tokens=7)
    tokens = prompt(3, 37)
    alone = CacheOptions(insert=False)
    for options, cached in ((alone, 0), (alone, 0), (None, 0), (alone, 36)):
        request_id = run.send(tokens, cache=options, max_tokens=6)
        run.finish()
        assert run.cached[request_id] == cached
        assert run.tokens[request_id] == reference.greedy(tokens, 6)
        run.audit()


def test_nobody_waits_for_a_prompt_that_will_not_be_kept(harness):
    run = harness(pages=1000, prefill_tokens=64, max_batched_tokens=300)
    tokens = prompt(4, 30)
    run.send(tokens, cache=CacheOptions(insert=False), max_tokens=3)
    second = run.send(tokens, max_tokens=3)
    run.step()
    assert second in run.tokens


def test_without_lookup_a_warm_prompt_is_computed_in_full(harness, reference):
    run = harness()
    tokens = prompt(5, 30)
    run.send(tokens, max_tokens=2)
    run.finish()
    cold = run.send(tokens, cache=CacheOptions(lookup=False), max_tokens=2)
    warm = run.send(tokens, max_tokens=2)
    run.finish()
    assert (run.cached[cold], run.cached[warm]) == (0, 29)
    assert run.tokens[cold] == run.tokens[warm] == reference.greedy(tokens, 2)
    run.audit()


def public(run, tokens: list[int], *, readers: tuple[str, ...], name: str = "house") -> None:
    run.engine.receive(PublicPrefix(name=name, tenants=readers, prompt=pack(tokens)))


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_public_prefix_is_read_by_those_that_were_named_and_by_nobody_else(
    harness, reference, namespace, sharing, page_size
):
    quotas = tenants("a", "b", "c", sharing=sharing)
    run = harness(
        cache_options={**quotas, "pin_budget": 0.2, "reserve_public": True},
        page_size=page_size,
        pages=800 // page_size,
    )
    house = prompt(6, 42)
    kept = 42 // page_size * page_size
    public(run, house, readers=("a", "b"))
    run.finish()
    assert not run.ended  # the request that computed it is the engine's own
    for tenant, salt, cached in (
        ("a", None, kept),
        ("b", None, kept),
        ("b", "other", kept),
        ("c", None, 0),
    ):
        tokens = house + prompt(7, 10)
        request_id = run.send(tokens, namespace(tenant=tenant, salt=salt), max_tokens=4)
        run.finish()
        assert run.cached[request_id] == cached, (tenant, salt)
        assert run.tokens[request_id] == reference.greedy(tokens, 4)
        again = run.send(tokens, namespace(tenant=tenant, salt=salt), max_tokens=4)
        run.finish()
        assert run.cached[again] == 51 // page_size * page_size
        assert run.tokens[again] == run.tokens[request_id]
        run.audit()


def test_a_public_prefix_is_computed_again_for_a_new_api_process(harness, namespace):
    run = harness(cache_options={**tenants("a"), "reserve_public": True}, pages=800)
    public(run, prompt(6, 30), readers=("a",))
    run.step()
    run.engine.abort_all()
    run.audit()
    public(run, prompt(6, 30), readers=("a",))
    public(run, prompt(6, 30), readers=("a",))
    run.finish()
    hit = run.send(prompt(6, 40), namespace(tenant="a"), max_tokens=1)
    run.finish()
    assert run.cached[hit] == 30
    run.audit()


@pytest.mark.parametrize(
    ("tokens", "options", "said"),
    [
        (100, {"reserve_public": True}, "--pin-budget"),
        (20, {}, "start the server with one"),
        (3, {"reserve_public": True}, "fill no page"),
    ],
)
def test_a_public_prefix_that_cannot_be_kept_is_said_and_harms_nobody(
    harness, namespace, caplog, tokens, options, said
):
    run = harness(cache_options={**tenants("a"), **options}, pages=200, page_size=4)
    with caplog.at_level(logging.ERROR, "ktserve.engine"):
        public(run, prompt(6, tokens), readers=("a",))
        run.finish()
    assert said in caplog.text
    served = run.send(prompt(6, 60), namespace(tenant="a"), max_tokens=1)
    run.finish()
    assert run.cached[served] == 0


def test_an_idle_engine_forgets_what_its_time_to_live_is_over_for(harness, namespace):
    now = [0]
    quotas = tenants("short", "long", short=Quota(cache_ttl=10))
    run = harness(cache_options={**quotas, "clock": lambda: now[0]}, pages=400)
    for tenant in ("short", "long"):
        run.send(prompt(8, 30), namespace(tenant=tenant), max_tokens=1)
    run.finish()
    assert 9_000 < run.engine.idle_ms <= 10_001
    now[0] = 9_000_000_000
    run.engine.tidy()
    assert len(list(run.cache.forest.trees())) == 2
    now[0] = 10_500_000_000
    run.engine.tidy()
    assert [tree.namespace.tenant for tree in run.cache.forest.trees()] == ["long"]
    assert run.engine.busy  # the new counts are still to be told
    assert run.engine.idle_ms is None
    run.audit()


def test_the_debug_log_says_why_a_request_found_what_it_found(harness, caplog):
    run = harness(page_size=4, pages=100)
    with caplog.at_level(logging.DEBUG, "ktserve.engine"):
        for tokens in (prompt(9, 30), prompt(9, 30), prompt(9, 20) + prompt(10, 10), [5, 6]):
            run.send(tokens, max_tokens=1)
            run.finish()
    reasons = [
        record.getMessage().rpartition("cached: ")[2]
        for record in caplog.records
        if "cached: " in record.getMessage()
    ]
    assert reasons == [
        "cold",
        "hit 28 tokens",
        "diverged at token 20, 20 tokens before it found",
        "below a page",
    ]


def test_an_idle_engine_sleeps_no_longer_than_a_poll_can(harness, namespace):
    longest = Quota(cache_ttl=MAX_TTL)
    run = harness(cache_options=tenants("t", t=longest))
    run.send(prompt(1, 10), namespace(), max_tokens=1)
    run.finish()
    assert 0 < run.engine.idle_ms < 2**31


@pytest.mark.parametrize("sharing", SHARING)
def test_who_is_not_declared_is_served_or_refused_and_never_waits_for_ever(
    harness, namespace, sharing
):
    run = harness(cache_options=tenants("a", "b", sharing=sharing), pages=100)
    stranger = run.send(prompt(1, 10), namespace(tenant="c"), max_tokens=2)
    run.finish()
    if sharing == "partitioned":
        assert (run.ended[stranger].status, run.ended[stranger].code) == (503, "no_share")
    else:
        assert len(run.tokens[stranger]) == 2


@pytest.mark.parametrize(
    ("page_size", "pages", "prompts", "prefill"), [(1, 100, (45, 70), 20), (16, 10, (66, 90), 512)]
)
def test_quotas_that_change_under_running_sequences_break_nothing(
    harness, namespace, page_size, pages, prompts, prefill
):
    """Who holds more than its new part keeps it for now, so the other's part is not all there."""
    run = harness(
        cache_options=tenants("a", "b", sharing="partitioned"),
        page_size=page_size,
        pages=pages,
        prefill_tokens=prefill,
        max_batched_tokens=600,
    )
    first = run.send(prompt(1, prompts[0]), namespace(tenant="a"), max_tokens=5)
    run.step()
    run.cache.set_quotas({"a": Quota(cache_floor=0.1), "b": Quota(cache_floor=0.9)})
    second = run.send(prompt(2, prompts[1]), namespace(tenant="b"), max_tokens=2, ignore_eos=True)
    while run.engine.busy:
        run.step()
        run.audit()
    assert len(run.tokens[second]) == 2
    assert first in run.ended


def test_who_lacks_pages_below_its_own_cap_takes_nobody_elses_pin(harness, namespace):
    options = tenants("a", "b", a=Quota(cache_cap=0.5))
    run = harness(cache_options={**options, "pin_budget": 0.5}, pages=100)
    for tenant, seed in (("b", 1), ("a", 2)):
        run.send(prompt(seed, 30), namespace(tenant=tenant), max_tokens=1)
        run.finish()
        run.cache.pin(namespace(tenant=tenant), pack(prompt(seed, 20)))
    whole = run.send(prompt(3, 45), namespace(tenant="a"), max_tokens=5, ignore_eos=True)
    run.finish()
    assert len(run.tokens[whole]) == 5
    assert [pin.lease.node.tree.namespace.tenant for pin in run.cache.kept.pins.values()] == ["b"]


def test_public_prefixes_do_not_queue_behind_clients_limits(harness, namespace):
    run = harness(
        cache_options={**tenants("a"), "reserve_public": True, "pin_budget": 0.5},
        pages=400,
        max_queued=1,
        max_running=1,
    )
    for name in range(5):
        public(run, prompt(20 + name, 12), readers=("a",), name=f"p{name}")
    run.finish()
    for name in range(5):
        hit = run.send(prompt(20 + name, 20), namespace(tenant="a"), max_tokens=1)
        run.finish()
        assert run.cached[hit] == 12


def test_limits_of_tenants_do_not_reach_public_prefixes(harness, namespace):
    options = {"reserve_public": True, "max_nodes": 1, "max_namespaces": 1}
    run = harness(cache_options={**tenants("a"), **options}, pages=800)
    for name in ("p", "q"):
        public(run, prompt(ord(name), 30), readers=("a",), name=name)
    run.finish()
    for name in ("p", "q"):
        hit = run.send(prompt(ord(name), 40), namespace(tenant="a"), max_tokens=1)
        run.finish()
        assert run.cached[hit] == 30


def test_without_a_cache_a_public_prefix_is_said_not_to_be_kept(harness, caplog):
    run = harness(enabled=False, cache_options=tenants("a"))
    with caplog.at_level(logging.WARNING, "ktserve.engine"):
        public(run, prompt(6, 30), readers=("a",))
        run.finish()
    assert "--disable-radix-cache" in caplog.text


@pytest.mark.parametrize(
    ("method", "pages"), [("match", 200), ("extend", 200), ("release", 200), ("evict", 80)]
)
def test_an_error_inside_the_cache_fails_what_runs_and_the_engine_goes_on(
    harness, reference, namespace, monkeypatch, caplog, method, pages
):
    run = harness(cache_options=tenants("a"), pages=pages)
    run.send(prompt(30, 40), namespace(tenant="a"), max_tokens=1)
    run.finish()
    ids = [
        run.send(prompt(n, 20), namespace(tenant="a"), max_tokens=8 + 4 * n, ignore_eos=True)
        for n in range(2)
    ]
    run.step()
    sound = getattr(run.cache.forest, method)
    struck = []

    def broken(*arguments, **options):
        if not struck:
            struck.append(method)
            raise MemoryError("planted")
        return sound(*arguments, **options)

    monkeypatch.setattr(run.cache.forest, method, broken)
    ids += [run.send(prompt(9, 30), namespace(tenant="a"), max_tokens=8)]
    with caplog.at_level(logging.ERROR):
        run.finish()
    run.audit()
    assert struck
    assert "planted" in caplog.text
    failed = [one for one in ids if isinstance(run.ended[one], RequestFailed)]
    assert failed
    assert {run.ended[one].status for one in failed} == {500}
    assert run.engine.stats().invariant_breaches == 1
    again = run.send(prompt(9, 30), namespace(tenant="a"), max_tokens=8)
    run.finish()
    assert run.tokens[again] == reference.greedy(prompt(9, 30), 8)


def test_an_error_elsewhere_ends_the_engine(harness, monkeypatch):
    run = harness()

    def broken(_batch):
        raise MemoryError("planted")

    monkeypatch.setattr(run.engine._runner, "run", broken)
    run.send(prompt(1, 20))
    with pytest.raises(MemoryError):
        run.step()


def test_an_error_inside_the_cache_that_comes_back_at_once_ends_the_engine(harness, monkeypatch):
    run = harness()

    def broken(*_arguments, **_options):
        raise MemoryError("planted")

    monkeypatch.setattr(run.cache.forest, "match", broken)
    run.send(prompt(1, 20))
    for _ in range(3):
        run.step()
        run.audit()
    with pytest.raises(MemoryError):
        run.step()
