"""Random operations on a cache, as the scheduler, its clients and an operator make them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ktserve.cache.kept import CacheError
from ktserve.cache.manager import CacheManager
from ktserve.cache.policies import EvictionPolicy
from ktserve.cache.pool import PagePool
from ktserve.cache.records import Records
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack

SECOND = 1_000_000_000
TENANTS = ["a", "b", "c"]
NAMESPACES = [
    Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)
    for tenant in TENANTS
    for salt in (None, "s", "t")
]
QUOTAS: list[dict[str, Quota]] = [
    {tenant: Quota() for tenant in TENANTS},
    {"a": Quota(weight=3, cache_ttl=2), "b": Quota(), "c": Quota(cache_ttl=1)},
    {"a": Quota(cache_cap=0.4), "b": Quota(cache_floor=0.3), "c": Quota(cache_cap=0.3)},
]


class Setup(NamedTuple):
    sharing: CacheSharing
    page_size: int
    policy: EvictionPolicy
    edge: int
    options: dict[str, Any]


SETUPS = [
    Setup("floors", 1, "lru", 8192, {"max_namespaces": 2}),
    Setup("floors", 4, "slru", 8, {}),
    Setup("shared", 1, "lfu", 4, {"max_nodes": 12}),
    Setup("shared", 4, "fifo", 8192, {}),
    Setup("partitioned", 1, "priority", 8, {}),
    Setup("partitioned", 4, "lru", 16, {"reserve_public": False}),
]


class Driver:
    """Does random things to a cache, as the scheduler and an operator would."""

    def __init__(self, setup: Setup, seed: int, capacity: int = 65_536) -> None:
        self.random = random.Random(seed)
        self.time = 1
        self.records = Records(capacity)
        options = {"pin_budget": 0.3, "reserve_public": True, **setup.options}
        self.cache = CacheManager(
            PagePool(96),
            setup.page_size,
            sharing=setup.sharing,
            policy=setup.policy,
            quotas=QUOTAS[0],
            records=self.records,
            clock=lambda: self.time,
            **options,
        )
        self.running: list[tuple[BlockTable, list[int]]] = []
        self.known: list[list[int]] = [[0]]
        often: list[tuple[int, Callable[[], object]]] = [
            (22, self.open),
            (26, self.compute),
            (22, self.close),
            (4, self.wait),
            (3, self.cache.expire),
            (1, self.flush),
            (1, self.divide),
            (2, self.pin),
            (2, self.unpin),
            (1, self.publish),
            (1, self.withdraw),
        ]
        self.operations = [operation for times, operation in often for _ in range(times)]

    def step(self) -> None:
        self.time += self.random.randrange(1000)
        self.random.choice(self.operations)()

    def prompt(self) -> list[int]:
        """Mostly one that begins like another."""
        pick = self.random
        start = pick.choice(self.known)
        tokens = start[: pick.randint(1, len(start))]
        tokens = tokens + [pick.randrange(3) for _ in range(pick.randint(0, 12))]
        if len(self.known) > 60:
            self.known.pop(pick.randrange(len(self.known)))
        self.known.append(tokens[:48])
        return tokens[:48]

    def open(self) -> None:
        if len(self.running) >= 8:
            return
        pick, tokens = self.random, self.prompt()
        table = self.cache.open(
            pick.choice(NAMESPACES),
            pack(tokens),
            request=pick.randrange(1, 1000),
            insert=pick.random() < 0.9,
            lookup=pick.random() < 0.9,
            priority=pick.choice([0, 0, 0, 1, 2]),
            first=pick.random() < 0.8,
        )
        self.running.append((table, tokens))

    def compute(self) -> None:
        """A chunk of a prompt, or of an answer behind it."""
        if not self.running:
            return
        pick = self.random
        table, tokens = pick.choice(self.running)
        if pick.random() < 0.3:
            tokens += [pick.randrange(3) for _ in range(pick.randint(1, 8))]
        end = pick.randint(min(table.cached_tokens + 1, len(tokens)), len(tokens))
        if end > table.lease.length * self.cache.page_size and self.cache.grow(table, end):
            self.cache.commit(table, pack(tokens[:end]))

    def close(self) -> None:
        if not self.running:
            return
        pick = self.random
        table, tokens = self.running.pop(pick.randrange(len(self.running)))
        end = min(len(tokens), table.length * self.cache.page_size)
        self.cache.close(table, b"" if pick.random() < 0.3 else pack(tokens[:end]))

    def wait(self) -> None:
        self.time += int(self.random.choice([0.01, 0.1, 0.7]) * SECOND)

    def flush(self) -> None:
        self.cache.flush(self.random.choice([None, *NAMESPACES, *NAMESPACES]))

    def divide(self) -> None:
        self.cache.set_quotas(self.random.choice(QUOTAS))

    def pin(self) -> None:
        try:
            self.cache.pin(self.random.choice(NAMESPACES), pack(self.prompt()))
        except CacheError:
            return

    def unpin(self) -> None:
        pins = list(self.cache.kept.pins.values())
        if pins and self.random.random() < 0.3:
            self.cache.yield_pin(self.random.choice(TENANTS), own=False)
        elif pins:
            self.cache.unpin(self.random.choice(pins).id)

    def publish(self) -> None:
        tokens = pack(self.random.choice(self.known)[:10])
        readers = self.random.choice([["a"], ["a", "b"]])
        try:
            prefix = self.cache.publish(self.random.choice(["p", "q"]), readers, tokens)
        except CacheError:
            return
        table = self.cache.open(prefix.namespace, tokens)
        grown = self.cache.grow(table, len(tokens) // 4)
        self.cache.close(table, tokens if grown else b"")
        self.cache.hold(prefix)

    def withdraw(self) -> None:
        self.cache.withdraw(self.random.choice(["p", "q"]))


def fingerprint(cache: CacheManager) -> Any:
    """Everything that a cache is, down to the order of its queues."""
    trees = cache.forest
    return {
        "nodes": [
            (tree.index, *(of_slots(node) for root in tree.roots() for node in below(root)))
            for tree in trees.trees()
        ],
        "trees": [of_slots(tree) for tree in trees.trees()],
        "accounts": [of_slots(account) for account in cache.accounts],
        "orders": [
            (of_slots(one.victims), plain(list(one.victims)), plain(list(one.victims.ordered())))
            for one in cache.accounts
        ],
        "totals": plain(vars(cache.accounts)),
        "forest": plain(vars(trees)),
        "ghosts": [plain(vars(account.ghosts)) for account in cache.accounts],
        "manager": plain(vars(cache)),
        "free": cache.pool.free_ids().tolist(),
        "tables": [of_slots(table) for table in cache.tables],
        "next record": cache._records.next_seq if cache._records else None,
    }


def below(node: Any) -> Any:
    yield node
    for child in node.children.values():
        yield from below(child)


def of_slots(thing: Any) -> Any:
    return plain({name: getattr(thing, name) for name in type(thing).__slots__})


def plain(value: Any) -> Any:
    """A copy whose parts are compared by value, and objects by identity."""
    if isinstance(value, dict):
        return [(plain(key), plain(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, set):
        return {id(one) for one in value}
    if isinstance(value, bytearray | np.ndarray):
        return bytes(value)
    return value if isinstance(value, int | float | str | bytes | None) else id(value)
