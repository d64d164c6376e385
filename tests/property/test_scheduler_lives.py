"""Random lives of the scheduler without a model: every request ends, whatever shares the pool."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from ktserve.cache.audit import audit
from ktserve.cache.kept import CacheError, PublicPrefix
from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.engine.scheduler import MAX_PREEMPTIONS, Batch, Scheduler, SchedulerLimits
from ktserve.engine.sequence import Sequence
from ktserve.messages import CacheOptions, Request, SamplingParams
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import TOKEN_BYTES, pack

ARRIVALS = 120
"""Steps in which requests arrive."""

PATIENCE = 4000
"""Steps after the last arrival within which all must have ended; they need some hundred."""

STEPS_OF_LOAD = 2500


def compute(scheduler: Scheduler, batch: Batch, draw: random.Random, ids: int) -> list[int]:
    """Run ``batch`` without a model, on ``ids`` token ids; the requests that have ended by it."""
    scheduler.computed(batch)
    ended = []
    for sequence in [part.sequence for part in batch.parts if part.samples]:
        sequence.append(draw.randrange(ids))
        if sequence.generated >= sequence.request.sampling.max_tokens:
            scheduler.remove(sequence)
            ended.append(sequence.request.request_id)
    return ended


class Life:
    """One scheduler over one small pool, and everything that can happen to it.

    Args:
        strangers: some requests are of a tenant without a quota.
        changing: quotas change all the time.
    """

    def __init__(self, seed: int, *, strangers: bool, changing: bool) -> None:
        self.draw = draw = random.Random(seed)
        self.tenants = "abcz" if strangers else "abc"
        self.changing = changing
        self.now = 0
        self.cache = self.make_cache()
        limits = SchedulerLimits(
            max_running=draw.choice([1, 2, 4, 8]),
            max_queued=100,
            max_batched_tokens=draw.choice([4, 12, 4096]),
            prefill_tokens=draw.choice([1, 3, 10, 4096]),
            policy=draw.choice(["fcfs", "lpm"]),
        )
        self.scheduler = Scheduler(self.cache, limits, clock=lambda: self.now / 1e9)
        self.starts = [[draw.randrange(3) for _ in range(40)] for _ in range(3)]
        self.added: list[int] = []
        self.ended: list[int] = []
        self.prefixes: dict[int, PublicPrefix] = {}

    def make_cache(self) -> CacheManager:
        draw = self.draw
        for _ in range(100):
            try:
                return CacheManager(
                    PagePool(draw.randrange(12, 80)),
                    draw.choice([1, 1, 2, 4, 16]),
                    enabled=draw.random() < 0.9,
                    sharing=draw.choice(["shared", "floors", "partitioned"]),
                    policy=draw.choice(["lru", "lfu", "slru", "fifo", "priority"]),
                    quotas=self.quotas(),
                    max_namespaces=draw.choice([1, 2, 100]),
                    max_nodes=draw.choice([None, 1, 3, 20]),
                    pin_budget=draw.choice([0, 0.1, 0.5]),
                    reserve_public=draw.random() < 0.4,
                    clock=self.clock,
                )
            except ValueError:
                continue  # a part of no page; draw others
        raise AssertionError("no quotas fit")

    def clock(self) -> int:
        self.now += 1000
        return self.now

    def quotas(self) -> dict[str, Quota]:
        draw = self.draw
        ttl = draw.choice([None, 1e-4, 0.01])
        return {
            "a": Quota(draw.choice([1, 2, 5]), None, draw.choice([None, 0.5, 0.8]), ttl),
            "b": Quota(draw.choice([1, 3]), draw.choice([None, 0.2]), draw.choice([None, 0.4])),
            "c": Quota(0.5),
        }

    def arrive(self) -> None:
        draw = self.draw
        tokens = draw.choice(self.starts)[: draw.randrange(1, 40)]
        request = Request(
            request_id=len(self.added) + 1,
            namespace=self.namespace(draw.choice(self.tenants), draw.choice([None, "x", "y"])),
            prompt=pack(tokens + [draw.randrange(3) for _ in range(draw.randrange(1, 6))]),
            sampling=SamplingParams(max_tokens=draw.randrange(1, 40)),
            cache=CacheOptions(
                insert=draw.random() < 0.7,
                lookup=draw.random() < 0.8,
                priority=draw.randrange(3),
            ),
        )
        self.added.append(request.request_id)
        self.send(request)

    def send(self, request: Request) -> None:
        sequence = Sequence(request, seed=0, arrival=self.now / 1e9)
        if self.scheduler.add(sequence) is not None:
            self.end(request.request_id)

    def end(self, request_id: int) -> None:
        prefix = self.prefixes.pop(request_id, None)
        if prefix is None:
            self.ended.append(request_id)
        else:
            self.cache.hold(prefix)

    def operate(self) -> None:
        """What an operator and the clock do."""
        draw, cache = self.draw, self.cache
        if draw.random() < 0.05:
            with contextlib.suppress(CacheError):
                cache.pin(self.namespace(draw.choice("abc"), None), pack(draw.choice(self.starts)))
        if draw.random() < 0.02:
            cache.flush()
        if draw.random() < 0.1:
            cache.expire()
        if self.changing and draw.random() < 0.03:
            with contextlib.suppress(ValueError):
                cache.set_quotas(self.quotas())
        if draw.random() < 0.02:
            self.publish()

    def publish(self) -> None:
        try:
            tokens = pack(self.draw.choice(self.starts)[:8])
            prefix = self.cache.publish(self.draw.choice("pq"), ["a", "b"], tokens)
        except CacheError:
            return
        if prefix.lease is None and -prefix.id not in self.prefixes:
            self.prefixes[-prefix.id] = prefix
            self.send(
                Request(
                    request_id=-prefix.id,
                    namespace=prefix.namespace,
                    prompt=prefix.tokens,
                    sampling=SamplingParams(max_tokens=1),
                )
            )

    def abort(self) -> None:
        alive = [*self.scheduler.running, *self.scheduler.waiting]
        if alive and self.draw.random() < 0.05:
            victim = self.draw.choice(alive)
            self.scheduler.remove(victim)
            self.end(victim.request.request_id)

    def step(self) -> bool:
        """One step; False where nothing was run."""
        batch = self.scheduler.next_batch()
        for failure in self.scheduler.failures:
            self.end(failure.request_id)
        self.scheduler.failures.clear()
        if batch is None:
            assert not self.scheduler.busy, "somebody waits for nobody"
            return False
        for request_id in compute(self.scheduler, batch, self.draw, 3):
            self.end(request_id)
        return True

    def steps(self) -> Iterator[int]:
        """Live; gives the number of each step that was made."""
        for number in range(ARRIVALS + PATIENCE):
            arriving = number < ARRIVALS
            if arriving and self.draw.random() < 0.5:
                self.arrive()
            self.operate()
            self.abort()
            ran = self.step()
            yield number
            if not ran and not arriving:
                return

    @staticmethod
    def namespace(tenant: str, salt: str | None) -> Namespace:
        return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)


@pytest.mark.parametrize("changing", [False, True], ids=["fixed quotas", "changing quotas"])
@pytest.mark.parametrize("strangers", [False, True], ids=["declared", "and a stranger"])
def test_every_request_ends_and_nobody_holds_more_than_its_part(
    strangers: bool, changing: bool
) -> None:
    preemptions = 0
    for seed in range(60):
        life = Life(seed, strangers=strangers, changing=changing)
        for number in life.steps():
            if number % 7 == 0:
                running = [one.table for one in life.scheduler.running if one.table is not None]
                audit(life.cache, running)
            if not changing:
                for account in life.cache.accounts:
                    assert account.held <= account.share.cap
                alive = [*life.scheduler.running, *life.scheduler.waiting]
                assert all(one.preemptions <= MAX_PREEMPTIONS for one in alive)
        assert not life.scheduler.busy, f"seed {seed}: somebody waits for ever"
        assert sorted(life.ended) == life.added
        assert not life.cache.tables
        assert not life.prefixes
        preemptions += life.scheduler.preemptions
    assert preemptions > 40


def test_a_tenant_below_its_floor_loses_nothing_to_others_running_sequences() -> None:
    """The scheduler takes pages from the cache; the floor holds against it, too."""
    for seed in range(20):
        draw = random.Random(seed)
        quotas = {"quiet": Quota(), "noisy": Quota()}
        cache = CacheManager(PagePool(64), 1, sharing="floors", quotas=quotas)
        scheduler = make_scheduler(cache, step_tokens=64)
        tokens = pack([draw.randrange(3) for _ in range(16)])  # its floor is 16 pages
        table = cache.open(Life.namespace("quiet", None), tokens)
        assert cache.grow(table, len(tokens) // TOKEN_BYTES)
        cache.close(table, tokens)
        for number in range(1, 20):
            prompt = [draw.randrange(50) for _ in range(draw.randrange(1, 30))]
            one = make_sequence(number, prompt, draw.randrange(1, 18), tenant="noisy")
            assert scheduler.add(one) is None
        while (batch := scheduler.next_batch()) is not None:
            compute(scheduler, batch, draw, 50)
            assert cache.accounts.of("quiet").held == 16
        assert not scheduler.busy


def make_scheduler(
    cache: CacheManager, *, max_running: int = 8, max_queued: int = 100, step_tokens: int = 4096
) -> Scheduler:
    limits = SchedulerLimits(
        max_running=max_running,
        max_queued=max_queued,
        max_batched_tokens=step_tokens,
        prefill_tokens=step_tokens,
        policy="fcfs",
    )
    return Scheduler(cache, limits)


def make_sequence(
    number: int,
    tokens: list[int],
    max_tokens: int,
    *,
    tenant: str = "a",
    arrival: float = 0.0,
    insert: bool = True,
) -> Sequence:
    request = Request(
        request_id=number,
        namespace=Life.namespace(tenant, None),
        prompt=pack(tokens),
        sampling=SamplingParams(max_tokens=max_tokens),
        cache=CacheOptions(insert=insert),
    )
    return Sequence(request, seed=0, arrival=arrival)


@pytest.mark.parametrize(
    ("sharing", "small", "cap"),
    [
        ("shared", 20, None),
        ("shared", 36, None),  # two at a time never fit at their longest
        ("shared", 17, 0.5),
        ("floors", 14, None),
        ("floors", 25, None),
        ("floors", 17, 0.4),
        ("partitioned", 7, None),
        ("partitioned", 13, None),
    ],
)
def test_under_a_load_that_never_ends_each_has_its_turn_and_the_queue_its_limit(
    sharing: CacheSharing, small: int, cap: float | None
) -> None:
    draw = random.Random(small)
    quotas = {"a": Quota(cache_cap=cap), "b": Quota(), "quiet": Quota()}
    max_running, max_queued = 12, 4
    cache = CacheManager(PagePool(60), 1, sharing=sharing, quotas=quotas)
    quiet = cache.accounts.of("quiet")
    floor = quiet.share.floor
    table = cache.open(Life.namespace("quiet", None), pack(range(floor + 1)))
    assert cache.grow(table, floor)
    cache.close(table, pack(range(floor)))
    scheduler = make_scheduler(cache, max_running=max_running, max_queued=max_queued)
    came: dict[int, int] = {}
    longest_life = count = 0
    for step in range(STEPS_OF_LOAD):
        while True:  # as many as the queue takes
            count += 1
            tenant = draw.choice("ab")
            most = cache.capacity(tenant) - 1 if draw.random() < 0.1 else small
            prompt = [draw.randrange(1000)]
            one = make_sequence(count, prompt, most, tenant=tenant, arrival=step)
            if scheduler.add(one) is not None:
                break
            came[count] = step
        batch = scheduler.next_batch()
        assert batch is not None
        for request_id in compute(scheduler, batch, draw, 1000):
            longest_life = max(longest_life, step - came.pop(request_id))
        assert len(scheduler.waiting) <= max_queued + max_running
        alive = [*scheduler.running, *scheduler.waiting]
        assert all(one.preemptions <= MAX_PREEMPTIONS for one in alive), "protected for nothing"
        assert quiet.held == floor
    assert scheduler.preemptions > 200
    # All that are there at once could run one after the other in that time.
    bound = (max_queued + 2 * max_running) * 60
    assert longest_life <= bound
    assert STEPS_OF_LOAD - min(came.values()) <= bound


@pytest.mark.parametrize("sharing", ["floors", "partitioned"])
def test_who_stays_within_its_floor_is_preempted_for_nobody_else(sharing: CacheSharing) -> None:
    # Its sequences never need a second page, for which they might have to give up their own.
    draw = random.Random(1)
    cache = CacheManager(
        PagePool(60), 8, sharing=sharing, quotas={"a": Quota(), "b": Quota(), "quiet": Quota()}
    )
    scheduler = make_scheduler(cache)
    for number in range(1, 1500):
        tenant, most = draw.choice([("a", 140), ("b", 140), ("quiet", 7)])
        one = make_sequence(
            number, [number], most, tenant=tenant, arrival=number, insert=tenant != "quiet"
        )
        quiet = [
            one
            for one in (*scheduler.running, *scheduler.waiting)
            if one.request.namespace.tenant == "quiet"
        ]
        if tenant != "quiet" or not quiet:
            assert scheduler.add(one) is None
        assert not any(one.preemptions for one in quiet)
        batch = scheduler.next_batch()
        assert batch is not None
        compute(scheduler, batch, draw, 1000)
        while len(scheduler.waiting) > 8:
            scheduler.remove(scheduler.waiting[-1])
    assert scheduler.preemptions > 40


def test_a_pin_beyond_its_tenants_lowered_part_gives_way_to_another_tenants_request() -> None:
    cache = CacheManager(
        PagePool(100), 1, sharing="partitioned", quotas={"a": Quota(1), "b": Quota(9)}
    )
    pins = {}
    for tenant, length in (("b", 8), ("a", 2)):
        namespace, tokens = Life.namespace(tenant, None), pack(range(length))
        table = cache.open(namespace, tokens)
        assert cache.grow(table, length)
        cache.close(table, tokens)
        pins[tenant] = cache.pin(namespace, tokens)
    cache.set_quotas({"a": Quota(19), "b": Quota(1)})
    scheduler = make_scheduler(cache)
    # Below a's part beside a's own pin, and more than b's pin leaves.
    assert scheduler.add(make_sequence(1, [7] * 92, 1)) is None
    assert scheduler.next_batch() is not None
    assert list(cache.kept.pins) == [pins["a"].id]


@pytest.mark.parametrize(
    ("cap", "runs"),
    [(None, "b"), (0.5, "a")],
    ids=["of the pool", "of its tenant's part"],
)
def test_a_protected_sequence_that_waits_is_not_overtaken_to_the_pages_it_waits_for(
    cap: float | None, runs: str
) -> None:
    quotas = {"a": Quota(cache_cap=cap), "b": Quota()}
    cache = CacheManager(PagePool(40), 1, sharing="shared", quotas=quotas)
    scheduler = make_scheduler(cache)
    part = cache.capacity("a")
    arriving = [(runs, part // 2), ("a", part), ("a", part // 2), ("b", 20)]
    first, large, small, other = (
        make_sequence(number, [number], pages - 1, tenant=tenant, arrival=number)
        for number, (tenant, pages) in enumerate(arriving, 1)
    )
    for one in (first, large, small, other):
        one.preemptions = MAX_PREEMPTIONS
        assert scheduler.add(one) is None
    assert scheduler.next_batch() is not None
    # Where it is its tenant's part that is too small, it holds up its tenant alone.
    assert scheduler.running == ([first] if cap is None else [first, other])
    scheduler.remove(first)
    assert scheduler.next_batch() is not None
    assert large in scheduler.running
    assert small not in scheduler.running
