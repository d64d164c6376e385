"""Partitioned is non-interference: what others do changes nothing that a tenant can notice.

Each trace is the life of a quiet tenant. It is run alone, and then with a crowd of other tenants
whose operations fall between its own at random. Both runs are compared in everything: what each of
its requests finds and is told, which of its pages are resident, and what it loses.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from ktserve.cache.audit import audit
from ktserve.cache.kept import CacheError
from ktserve.cache.manager import CacheManager
from ktserve.cache.node import Node
from ktserve.cache.policies import EvictionPolicy
from ktserve.cache.pool import PagePool
from ktserve.cache.reasons import Reason
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import TOKEN_BYTES, pack

SECOND = 1_000_000_000
QUIET = "quiet"
CROWD = ["noisy", "noisier", "undeclared"]
POLICIES: list[EvictionPolicy] = ["lru", "lfu", "slru", "fifo", "priority"]
SYSTEM_PROMPT = [7, 7, 7, 7]


class Step(NamedTuple):
    """One operation of one tenant; ``at`` in seconds. A trace is ordered by it."""

    at: float
    tenant: str
    kind: str
    slot: int
    salt: str | None
    tokens: list[int]
    amount: int
    flag: bool


def steps_of(draw: random.Random, tenant: str, count: int, *, wild: bool) -> list[Step]:
    """A random life of ``tenant`` over 300 seconds; a wild one tries whatever could disturb."""
    kinds = ["open"] * 8 + ["advance"] * 12 + ["close"] * 7 + ["preempt", "flush"]
    salts: list[str | None] = [None, "s", "t"]
    if not wild:
        salts += ["short"] * 2
    else:
        kinds += ["pin", "unpin", "give_way", "huge"] + ["flood"] * 3
        salts += [str(number) for number in range(12)]
    starts = [[draw.randrange(3) for _ in range(12)] for _ in range(3)] + [SYSTEM_PROMPT]
    steps = []
    for at in sorted(draw.uniform(0, 300) for _ in range(count)):
        tokens = draw.choice(starts)[: draw.randrange(1, 13)]
        tokens = tokens + [draw.randrange(3) for _ in range(draw.randrange(1, 8))]
        salt = draw.choice(salts)
        if salt == "short":  # a namespace that stays nearly empty, the first to go at the limit
            tokens = tokens[:3]
        kind = draw.choice(kinds)
        if kind in {"flood", "huge"}:
            tokens = [draw.randrange(1000) for _ in range(60 if kind == "flood" else 400)]
        steps.append(
            Step(
                at,
                tenant,
                kind,
                draw.randrange(3),
                salt,
                tokens,
                draw.randrange(1, 9),
                draw.random() < 0.8,
            )
        )
    return steps


class Running:
    def __init__(self, table: BlockTable, step: Step) -> None:
        self.table = table
        self.step = step
        self.written = table.cached_tokens

    def tokens(self) -> bytes:
        return pack(self.step.tokens[: self.written])


class Life:
    """A cache that lives through a trace, and what the quiet tenant sees of it."""

    def __init__(self, sharing: CacheSharing, policy: EvictionPolicy) -> None:
        self.now = 0
        # A time to live runs out now and then, and so do the namespaces and the nodes.
        self.cache = CacheManager(
            PagePool(96),
            2,
            sharing=sharing,
            policy=policy,
            quotas={
                QUIET: Quota(weight=1.0, cache_ttl=70.0),
                "noisy": Quota(weight=1.0),
                "noisier": Quota(weight=2.0, cache_ttl=15.0),
            },
            max_namespaces=4,
            max_nodes=18,
            pin_budget=0.2,
            reserve_public=True,
            clock=lambda: self.now,
        )
        self.running: dict[tuple[str, int], Running] = {}
        self.log: list[object] = []
        prefix = self.cache.publish("system", [QUIET, *CROWD], pack(SYSTEM_PROMPT))
        table = self.cache.open(prefix.namespace, prefix.tokens)
        assert self.cache.grow(table, len(SYSTEM_PROMPT))
        self.cache.close(table, prefix.tokens)
        assert self.cache.hold(prefix)

    def live(self, trace: Sequence[Step]) -> list[object]:
        quiet = self.quiet()
        for number, step in enumerate(trace):
            self.now = int(step.at * SECOND)
            seen = getattr(self, step.kind)(step)
            if number % 8 == 0:
                audit(self.cache, [one.table for one in self.running.values()])
            if step.tenant in {QUIET, "clock"}:
                quiet = self.quiet()
                self.log.append((step.at, step.kind, seen if step.tenant == QUIET else None, quiet))
            elif self.cache.partitioned:
                assert self.quiet() == quiet, f"{step.kind} of {step.tenant} changed it"
        audit(self.cache, [one.table for one in self.running.values()])
        return self.log

    def quiet(self) -> object:
        """Everything about the quiet tenant: its trees, page by page, and its counters."""
        account = self.cache.accounts.of(QUIET)
        trees = {
            tree.namespace.cache_salt: (
                {(path(node), node.locks > 0) for node in tree.walk()},
                (tree.resident, tree.locked, tree.leases),
                (tree.lookups, tree.hits, tree.hit_tokens, tree.evicted, tree.caused),
            )
            for tree in account.trees.values()
        }
        counts = (account.resident, account.locked, account.private, account.nodes)
        told = (account.lookups, account.hit_tokens, account.hit_rate, account.evicted)
        room = min(self.cache.rooms(QUIET))
        return trees, counts, told, account.caused, dict(account.evicted_by), room

    # The operations. Each returns what its tenant sees.

    def open(self, step: Step, *, first: bool = True) -> object:
        key = (step.tenant, step.slot)
        if key in self.running:
            self.close(step)
        prompt = pack(step.tokens)
        namespace = ns(step.tenant, step.salt)
        peeked = self.cache.peek(namespace, prompt)
        table = self.cache.open(
            namespace,
            prompt,
            insert=step.flag,
            lookup=step.amount > 1,
            priority=step.amount,
            first=first,
        )
        self.running[key] = Running(table, step)
        return peeked, table.cached_tokens, rounded(table.reason)

    def advance(self, step: Step) -> object:
        """A chunk of the prompt is computed."""
        one = self.running.get((step.tenant, step.slot))
        if one is None:
            return None
        end = min(len(one.step.tokens), one.written + 2 * step.amount)
        if not self.cache.grow(one.table, end):
            return False
        one.written = end
        self.cache.commit(one.table, one.tokens())
        return one.table.lease.length

    def close(self, step: Step) -> object:
        one = self.running.pop((step.tenant, step.slot), None)
        if one is not None:
            self.cache.close(one.table, one.tokens() if step.flag else b"")
        return None

    def preempt(self, step: Step) -> object:
        """The sequence starts over."""
        one = self.running.get((step.tenant, step.slot))
        if one is None:
            return None
        return self.open(one.step, first=False)

    def flush(self, step: Step) -> object:
        return self.cache.flush(ns(step.tenant, step.salt))

    def expire(self, step: Step) -> object:
        assert step.tenant == "clock"
        self.cache.expire()
        return None

    def pin(self, step: Step) -> None:
        with contextlib.suppress(CacheError):  # beyond the budget, or nothing of it is cached
            self.cache.pin(ns(step.tenant, step.salt), pack(step.tokens))

    def unpin(self, step: Step) -> None:
        for pin in list(self.cache.kept.pins.values())[: step.amount]:
            self.cache.unpin(pin.id)

    def give_way(self, step: Step) -> None:
        self.cache.yield_pin(step.tenant, own=False)

    def flood(self, step: Step) -> None:
        """Eight long prompts that nobody sends again, as far as there is room."""
        for number in range(8):
            tokens = [number, *step.tokens]
            table = self.cache.open(ns(step.tenant, step.salt), pack(tokens))
            most = table.length + max(0, min(self.cache.rooms(step.tenant)))
            end = min(len(tokens), 2 * most)
            if self.cache.grow(table, end):
                self.cache.commit(table, pack(tokens[:end]))
            self.cache.close(table, b"")

    def huge(self, step: Step) -> None:
        """A prompt that cannot fit, asked for whole and then page by page, and kept running."""
        self.open(step)
        one = self.running[step.tenant, step.slot]
        self.cache.grow(one.table, len(step.tokens))
        while one.written < len(step.tokens) and self.cache.grow(one.table, one.written + 2):
            one.written += 2
        self.cache.commit(one.table, one.tokens())


def ns(tenant: str, salt: str | None) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)


def path(node: Node) -> tuple[int, bytes]:
    """The public prefix behind which a node stands, or 0, and its tokens from the root on."""
    parts: list[bytes] = []
    step = node
    while step.parent is not None:
        parts.append(bytes(step.key))
        step = step.parent
    behind = next((public for public, root in node.tree.grafts.items() if root is step), 0)
    return behind, b"".join(reversed(parts))


def rounded(reason: Reason | None) -> object:
    """A reason, its time in milliseconds: a tick more for each operation of others is no secret."""
    if reason is None or reason.seconds is None:
        return reason
    seconds = round(reason.seconds, 3)
    return (reason.kind, reason.tokens, reason.at, seconds, reason.by)


def traces(seed: int, crowds: int) -> tuple[list[Step], list[list[Step]]]:
    """The quiet tenant's trace, and the same with a crowd between its steps in ``crowds`` ways."""
    draw = random.Random(seed)
    own = steps_of(draw, QUIET, 240, wild=False)
    own += [Step(float(at), "clock", "expire", 0, None, [], 0, True) for at in range(7, 300, 11)]
    alone = sorted(own, key=lambda step: step.at)
    together = []
    for _ in range(crowds):
        others = [step for tenant in CROWD for step in steps_of(draw, tenant, 70, wild=True)]
        together.append(sorted(alone + others, key=lambda step: step.at))
    return alone, together


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_nothing_that_others_do_is_noticed_in_a_partition(
    policy: EvictionPolicy, seed: int
) -> None:
    alone, together = traces(seed, crowds=2)
    quiet = Life("partitioned", policy)
    expected = quiet.live(alone)
    # The trace means something: the tenant finds prefixes and loses pages, to itself alone.
    account = quiet.cache.accounts.of(QUIET)
    assert account.hit_tokens > 30
    assert set(account.evicted_by) == {QUIET, ""}
    for trace in together:
        crowded = Life("partitioned", policy)
        assert crowded.live(trace) == expected
        assert sum(crowded.cache.accounts.of(name).evicted for name in CROWD) > 200


@pytest.mark.parametrize("sharing", ["shared", "floors"])
@pytest.mark.parametrize("seed", range(2))
def test_the_same_crowd_is_noticed_where_the_pool_is_shared(
    sharing: CacheSharing, seed: int
) -> None:
    """The positive control: these traces do disturb, if anything lets them."""
    alone, together = traces(seed, crowds=2)
    expected = Life(sharing, "lru").live(alone)
    for trace in together:
        crowded = Life(sharing, "lru")
        assert crowded.live(trace) != expected
        if sharing == "shared":
            assert sum(crowded.cache.accounts.of(QUIET).evicted_by[name] for name in CROWD) > 0


def test_a_neighbours_many_evictions_do_not_change_a_reason() -> None:
    """What a lookup is told about an eviction of its own does not depend on how busy others are."""

    def reason(evictions_of_the_neighbour: int) -> object:
        life = Life("partitioned", "lru")
        one = ns(QUIET, None)
        prompt = pack(range(20))
        for tokens in (prompt, pack(range(100, 130)), pack(range(200, 230))):
            table = life.cache.open(one, tokens)
            assert life.cache.grow(table, len(tokens) // TOKEN_BYTES)
            life.cache.close(table, tokens)
        other = ns("noisy", None)
        account = life.cache.accounts.of("noisy")
        number = 0
        while account.evicted < evictions_of_the_neighbour:
            number += 1
            tokens = pack([number, 0, number, 1])
            table = life.cache.open(other, tokens)
            assert life.cache.grow(table, 4)
            life.cache.close(table, tokens)
        life.now += SECOND
        table = life.cache.open(one, prompt)
        life.cache.close(table, b"")
        audit(life.cache, [])
        return rounded(table.reason)

    quiet = reason(0)
    assert isinstance(quiet, tuple)
    assert quiet[0] == "evicted"
    assert reason(9_000) == quiet
