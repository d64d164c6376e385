"""An exception at each line of each operation on the cache.

One fault a run: the n-th line that the cache's code executes inside one operation raises, for every
n until the operation gets through. Then the books must be right, every open table must read what
was written for it, and the cache must go on as if nothing had been.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ktserve.cache import forest
from ktserve.cache.audit import audit
from ktserve.cache.kept import Pin, PublicPrefix
from ktserve.cache.manager import CacheManager
from ktserve.cache.node import Lease, path_pages
from ktserve.cache.pool import DoubleFree, PagePool
from ktserve.cache.records import Kind, Records
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack

FILES = {
    str(Path(forest.__file__).with_name(f"{name}.py"))
    for name in (
        *("accounts", "expiry", "explain", "forest", "ghosts", "manager", "node", "policies"),
        *("kept", "pool", "records", "tables", "victims"),
    )
}
RETURNS_A_NAME = re.compile(r"\s*return( \w+)?\s*")
"""A line that only hands a local variable to the caller cannot raise."""

PAGE = 2
SECOND = 1_000_000_000

A = Namespace(tenant="a", cache_salt=None, extra_key=None, adapter=None)
A_SALT = Namespace(tenant="a", cache_salt="s", extra_key=None, adapter=None)
A_THIRD = Namespace(tenant="a", cache_salt="t", extra_key=None, adapter=None)
B = Namespace(tenant="b", cache_salt=None, extra_key=None, adapter=None)


class Fault(Exception):
    """Raised by nobody else."""


class Line:
    """Raises at the ``number``-th line of the cache's code."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self.left = number
        self.error = error
        self.where = ""

    @property
    def raised(self) -> bool:
        return bool(self.where)

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._step if frame.f_code.co_filename in FILES else None

    def _step(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event != "line" or self.raised:
            return self._step
        path, number = frame.f_code.co_filename, frame.f_lineno
        if RETURNS_A_NAME.fullmatch(linecache.getline(path, number)):
            return self._step
        self.left -= 1
        if self.left == 0:
            self.where = f"{Path(path).name}:{number}"
            raise self.error
        return self._step


@dataclass
class Running:
    table: BlockTable
    tokens: list[int]
    written: int


@dataclass
class World:
    """A small cache and what each slot of its pages was written with."""

    cache: CacheManager
    time: list[int]
    slots: dict[int, tuple[Namespace, tuple[int, ...]]] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    public: dict[str, PublicPrefix] = field(default_factory=dict)
    pinned: list[Pin] = field(default_factory=list)
    prompts: list[tuple[Namespace, list[int]]] = field(default_factory=list)

    def open(self, name: str, namespace: Namespace, tokens: list[int], **options: Any) -> None:
        table = self.cache.open(namespace, pack(tokens), **options)
        self.running[name] = Running(table, list(tokens), table.cached_tokens)
        self.prompts.append((namespace, list(tokens)))

    def write(self, name: str, tokens: list[int] | None = None) -> None:
        """Get pages for all of a sequence's tokens and compute them."""
        one = self.running[name]
        one.tokens += tokens or []
        assert self.cache.grow(one.table, len(one.tokens))
        for position in range(one.written, len(one.tokens)):
            self.slots[self.slot(one.table, position)] = (
                one.table.namespace,
                tuple(one.tokens[: position + 1]),
            )
        one.written = len(one.tokens)

    def slot(self, table: BlockTable, position: int) -> int:
        return int(table.pages[position // PAGE]) * PAGE + position % PAGE

    def commit(self, name: str) -> None:
        one = self.running[name]
        self.cache.commit(one.table, pack(one.tokens[: one.written]))

    def close(self, name: str, *, keep: bool = True) -> None:
        one = self.running[name]
        self.cache.close(one.table, pack(one.tokens[: one.written] if keep else []))
        del self.running[name]

    def serve(self, namespace: Namespace, tokens: list[int], **options: Any) -> None:
        self.open("served", namespace, tokens, **options)
        self.write("served")
        self.commit("served")
        self.close("served")

    def publish(self, name: str, tokens: list[int]) -> None:
        prefix = self.cache.publish(name, ["a", "b"], pack(tokens))
        self.public[name] = prefix
        self.serve(prefix.namespace, [*tokens, 99])
        assert self.cache.hold(prefix)

    def check(self) -> None:
        """The books, and what is read under every lease."""
        cache = self.cache
        audit(cache, [one.table for one in self.running.values()])
        for one in self.running.values():
            for position in range(one.written):
                self._holds(one.table, one.tokens, position)
        for pin in cache.kept.pins.values():
            self._leased(pin.lease)
        for prefix in cache.kept.public.values():
            if prefix.lease is not None:
                self._leased(prefix.lease)

    def _holds(self, table: BlockTable, tokens: list[int], position: int) -> None:
        owner, content = self.slots[self.slot(table, position)]
        assert content == tuple(tokens[: position + 1])
        base = 0 if table.base is None else table.base.length * PAGE
        if position >= base:
            assert owner == table.namespace
        else:
            assert table.base is not None
            assert owner == table.base.node.tree.namespace

    def _leased(self, lease: Lease) -> None:
        pages = np.frombuffer(bytes(path_pages(lease.node)), dtype=np.int64).tolist()
        assert len(pages) == lease.length
        last = self.slots[pages[-1] * PAGE + PAGE - 1]
        assert last[0] == lease.node.tree.namespace
        for position in range(len(pages) * PAGE):
            slot = pages[position // PAGE] * PAGE + position % PAGE
            assert self.slots[slot] == (last[0], last[1][: position + 1])

    def go_on(self) -> None:
        """Serve every prompt again, which reads whatever is cached of it, and then some."""
        prompts = [one for at, one in enumerate(self.prompts) if one not in self.prompts[:at]]
        for namespace, tokens in [*prompts, (A, [7, 7, 8, 8, 9]), (B, [7, 7, 8, 8, 9])]:
            expected = self.cache.peek(namespace, pack(tokens))[0]
            self.open("again", namespace, tokens)
            table = self.running["again"].table
            assert table.cached_tokens == expected * PAGE
            for position in range(table.cached_tokens):
                self._holds(table, tokens, position)
            if self.cache.grow(table, len(tokens)):
                self.write("again")
            self.close("again")
        self.check()

    def end(self) -> None:
        """Close everything: no page stays behind."""
        for name in list(self.running):
            self.close(name)
        for pin in list(self.cache.kept.pins.values()):
            self.cache.unpin(pin.id)
        for name in list(self.cache.kept.public):
            self.cache.withdraw(name)
        self.cache.flush()
        assert list(self.cache.forest.trees()) == []
        assert sorted(self.cache.pool.free_ids().tolist()) == list(range(self.cache.pool.total))
        audit(self.cache, [])


def world(pages: int = 24, *, edge: int = 8192, **options: Any) -> World:
    time = [1]
    with mock.patch.object(forest, "EDGE_TOKENS", edge):
        cache = CacheManager(
            PagePool(pages),
            PAGE,
            records=Records(1024),
            clock=lambda: time[0],
            **{"quotas": {"a": Quota(), "b": Quota()}, "pin_budget": 0.3, **options},
        )
    return World(cache, time)


@dataclass
class Case:
    """An operation in a situation.

    Attributes:
        build: the situation.
        operate: what one fault is put into.
        done: whether the operation has had its effect; then `again` need not be possible.
        again: the same once more, with its effects noted in the world.
    """

    build: Callable[[], World]
    operate: Callable[[World], object]
    again: Callable[[World], object]
    done: Callable[[World], bool] = lambda world: False  # noqa: ARG005


CASES: dict[str, Case] = {}


def case(name: str, case: Case) -> None:
    assert name not in CASES
    CASES[name] = case


def opening(
    name: str, build: Callable[[], World], namespace: Namespace, tokens: list[int], **options: Any
) -> None:
    case(
        f"open: {name}",
        Case(
            build,
            lambda world: world.cache.open(namespace, pack(tokens), **options),
            lambda world: world.open("new", namespace, tokens, **options),
        ),
    )


def served(*prompts: tuple[Namespace, list[int]], **options: Any) -> Callable[[], World]:
    def build() -> World:
        one = world(**options)
        for namespace, tokens in prompts:
            one.serve(namespace, tokens)
        return one

    return build


LONG = [1, 1, 2, 2, 3, 3, 4, 4]


def with_public() -> World:
    one = world(pin_budget=0.4, reserve_public=True)
    one.publish("system", LONG)
    one.serve(A, [*LONG, 5, 5, 6, 6])
    return one


def crowded() -> World:
    one = world(max_namespaces=2)
    one.serve(A, LONG)
    one.serve(A_SALT, LONG[:4])
    return one


opening("a miss", world, A, LONG)
opening("a full hit", served((A, LONG)), A, [*LONG, 5])
opening("a hit that splits", served((A, LONG)), A, [*LONG[:4], 5, 5, 5])
opening("a hit with a priority", served((A, LONG[:4]), (A, LONG)), A, [*LONG, 5], priority=3)
opening("where its prefix was evicted", served((A, LONG), (A, LONG[:4])), A, [*LONG[:4], 9, 9])
opening("goes on", served((A, LONG)), A, [*LONG, 5], first=False)
opening("without a lookup", served((A, LONG)), A, LONG, lookup=False)
opening("behind a public prefix", with_public, A, [*LONG, 5, 5, 7, 7])
opening("first behind a public prefix", with_public, B, [*LONG, 5, 5, 7, 7])
opening("a namespace with a time to live", lambda: world(quotas={"a": Quota(cache_ttl=5)}), A, LONG)
opening("one namespace too many", crowded, A_THIRD, LONG)
opening(
    "a split beyond the limit of nodes",
    served((A, LONG), (A, [8, 8, 8, 8]), max_nodes=2),
    A,
    [*LONG[:4], 5, 5, 5],
)


def growing(name: str, build: Callable[[], World]) -> None:
    """The sequence "x" gets pages for all of its tokens."""
    case(
        f"grow: {name}",
        Case(
            build,
            lambda world: world.cache.grow(
                world.running["x"].table, len(world.running["x"].tokens)
            ),
            lambda world: world.write("x"),
        ),
    )


def ready(
    namespace: Namespace, tokens: list[int], *prompts: tuple[Namespace, list[int]], **options: Any
) -> Callable[[], World]:
    """The sequence "x" waits for pages."""

    def build() -> World:
        one = served(*prompts, **options)()
        one.open("x", namespace, tokens)
        return one

    return build


OTHERS = [(A, [20 + i, 20, 21, 21, 22, 22]) for i in range(3)]

growing("from the free list", ready(A, LONG))
growing("from its own whole nodes", ready(A, [*LONG] * 2, *OTHERS, pages=9, quotas={"a": Quota()}))
growing("from its own tails", ready(A, LONG, *OTHERS, pages=9, quotas={"a": Quota()}))
growing("from others", ready(B, LONG * 2, *OTHERS, pages=12))
growing("from all", ready(B, LONG * 2, *OTHERS, (B, [30, 30, 31, 31]), pages=12, sharing="shared"))
growing(
    "at its cap",
    ready(A, LONG * 2, *OTHERS, pages=24, quotas={"a": Quota(cache_cap=0.5), "b": Quota()}),
)
growing(
    "in a part of its own",
    ready(A, LONG, *OTHERS, (B, LONG), pages=20, sharing="partitioned", policy="priority"),
)
growing("beyond its table", ready(A, [1, *LONG * 5], pages=40))


def committing(name: str, build: Callable[[], World]) -> None:
    """The sequence "x" is written; its pages go into the forest."""
    tokens: Callable[[World], bytes] = lambda world: pack(world.running["x"].tokens)  # noqa: E731
    case(
        f"commit: {name}",
        Case(
            build,
            lambda world: world.cache.commit(world.running["x"].table, tokens(world)),
            lambda world: world.commit("x"),
        ),
    )
    for keep in (True, False):
        case(
            f"close {'with' if keep else 'without'} tokens: {name}",
            Case(
                build,
                lambda world, keep=keep: world.cache.close(  # type: ignore[misc]
                    world.running["x"].table, tokens(world) if keep else b""
                ),
                lambda world, keep=keep: world.close("x", keep=keep),  # type: ignore[misc]
                lambda world: world.running["x"].table not in world.cache.tables,
            ),
        )


def written(
    tokens: list[int], *prompts: tuple[Namespace, list[int]], priority: int = 0, **options: Any
) -> Callable[[], World]:
    def build() -> World:
        one = served(*prompts, **options)()
        one.open("x", A, tokens, priority=priority)
        one.write("x")
        return one

    return build


def grown_conversation(edge: int = 8192) -> World:
    one = world(edge=edge)
    one.open("x", A, LONG[:4])
    one.write("x")
    one.commit("x")
    one.write("x", LONG)
    return one


def overtaken(mine: list[int], theirs: list[int]) -> World:
    """Two compute the same at the same time."""
    one = world()
    one.open("x", A, mine)
    one.write("x")
    one.serve(A, theirs)
    return one


def behind_public() -> World:
    one = with_public()
    one.open("x", A, [*LONG, 5, 5, 7, 7])
    one.write("x")
    return one


def over_quota() -> World:
    one = world()
    for namespace, tokens in OTHERS:
        one.serve(namespace, tokens)
    one.open("x", A, LONG)
    one.write("x")
    one.cache.set_quotas({"a": Quota(cache_cap=0.2), "b": Quota()})
    return one


committing("a new node", written(LONG))
committing("a chain", written(LONG, edge=4))
committing("with a priority", written([*LONG, 5, 5], (A, LONG), priority=4, policy="priority"))
committing("below a split", written([*LONG[:4], 6, 6, 7, 7], (A, LONG)))
committing("a conversation", grown_conversation)
committing("a conversation beyond an edge", lambda: grown_conversation(edge=8))
committing("what is there already", lambda: overtaken(LONG, LONG))
committing("half of it there already", lambda: overtaken([*LONG[:4], 6, 6], LONG))
committing("more than is there already", lambda: overtaken([*LONG, 5, 5], LONG))
committing("a node too many", written(LONG, (A, [8, 8, 8, 8]), max_nodes=1))
committing("behind a public prefix", behind_public)
committing("above its quota", over_quota)


def expiring() -> World:
    one = world(quotas={"a": Quota(cache_ttl=5), "b": Quota(cache_ttl=50)})
    for namespace in (A, A_SALT, B):
        one.serve(namespace, LONG)
    one.open("x", A_SALT, [*LONG, 5])
    one.time[0] += 6 * SECOND
    return one


def forgotten(world: World) -> bool:
    world.cache.expire()
    return {tree.namespace for tree in world.cache.forest.trees()} == {A_SALT, B}


def flush_all(world: World) -> object:
    return world.cache.flush()


def flush_one(world: World) -> object:
    return world.cache.flush(A)


def expire(world: World) -> object:
    return world.cache.expire()


FULL = served((A, LONG), (A, [*LONG[:4], 9, 9]), (A_SALT, LONG), (B, LONG))
case("flush: all", Case(FULL, flush_all, flush_all))
case("flush: a namespace", Case(FULL, flush_one, flush_one))
case("expire", Case(expiring, expire, lambda world: _true(forgotten(world))))


def requota(world: World) -> None:
    world.cache.set_quotas({"a": Quota(weight=3, cache_cap=0.2, cache_ttl=9), "b": Quota()})


def requoted(world: World) -> None:
    """All of it holds, not a part."""
    requota(world)
    account = world.cache.accounts.of("a")
    assert account.held <= account.share.cap == int(0.2 * 24)
    assert world.cache.next_expiry is not None


case("set_quotas", Case(served(*OTHERS, (B, LONG)), requota, requoted))


def pin(world: World) -> object:
    return world.cache.pin(A, pack(LONG[:6]))


def pinned(world: World) -> bool:
    return bool(world.cache.kept.pins.values())


def one_pinned() -> World:
    one = FULL()
    one.pinned.append(one.cache.pin(A, pack(LONG[:6])))
    return one


case("pin", Case(FULL, pin, pin, pinned))
case(
    "unpin",
    Case(
        one_pinned,
        lambda world: world.cache.unpin(world.pinned[0].id),
        lambda world: world.cache.unpin(world.pinned[0].id),
        lambda world: not world.cache.kept.pins.values(),
    ),
)
case(
    "yield_pin",
    Case(
        one_pinned,
        lambda world: world.cache.yield_pin("a", own=False),
        lambda world: _true(world.cache.yield_pin("a", own=False)),
        lambda world: not world.cache.kept.pins.values(),
    ),
)


def republish(world: World) -> object:
    return world.cache.publish("system", ["a"], pack([5, *LONG[1:6]]))


def republished(world: World) -> None:
    prefix = republish(world)
    assert list(world.cache.kept.public.values()) == [prefix]


def computed() -> World:
    one = world(pin_budget=0.4, reserve_public=True)
    prefix = one.public["system"] = one.cache.publish("system", ["a", "b"], pack(LONG))
    one.serve(prefix.namespace, [*LONG, 99])
    return one


def hold(world: World) -> object:
    return world.cache.hold(world.public["system"])


case(
    "publish: a new one",
    Case(
        lambda: world(pin_budget=0.4, reserve_public=True),
        republish,
        republished,
    ),
)
case("publish: another one", Case(with_public, republish, republished))
case(
    "hold",
    Case(
        computed,
        hold,
        lambda world: _true(hold(world)),
        lambda world: world.public["system"].lease is not None,
    ),
)


def withdraw(world: World) -> object:
    return world.cache.withdraw("system")


case("withdraw", Case(with_public, withdraw, withdraw))


def _true(holds: object) -> None:
    assert holds is True


def strike(name: str, number: int, error: type[BaseException]) -> bool:
    """Raise ``error`` at one line of a case and look at everything; False where it has no more."""
    case = CASES[name]
    one = case.build()
    cache = one.cache
    public = dict(cache.kept.public)
    line = Line(number, error)
    try:
        with line.armed():
            case.operate(one)
    except error:
        assert line.raised
    if not line.raised:
        return False
    try:
        # A sequence that was being closed is or is not; all others still run.
        assert all(
            running.table in cache.tables or (name.startswith("close") and key == "x")
            for key, running in one.running.items()
        )
        done = case.done(one)
        if name.startswith("close") and done:
            del one.running["x"]
        assert cache.repairs <= 1  # one error is one error
        if cache.repairs:
            assert cache._records is not None
            assert cache._records.since(0)[0][-1].kind == Kind.REPAIRED
        # One public prefix of a name comes for another, and is never missing between them.
        assert name == "withdraw" or set(public) <= set(cache.kept.public)
        one.check()
        if not done:
            case.again(one)
            one.check()
        one.go_on()
        one.end()
    except Exception as problem:
        raise AssertionError(f"after {error.__name__} at {line.where}: {problem!r}") from problem
    return True


@pytest.mark.parametrize("name", CASES)
def test_a_fault_at_any_line_leaves_the_books_right(name: str) -> None:
    struck = 0
    while strike(name, struck + 1, Fault):
        struck += 1
    assert struck > 3  # something was there to fail


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_whatever_the_exception_is(error: type[BaseException]) -> None:
    for name in ("open: a hit that splits", "grow: from others", "commit: a chain"):
        for number in range(1, 200, 7):
            strike(name, number, error)


def test_without_the_recount_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: the faults do harm, and these tests notice it."""
    monkeypatch.setattr(CacheManager, "repair", lambda _cache: None)
    harmed = 0
    for number in range(1, 100):
        try:
            strike("commit: a new node", number, Fault)
        except (AssertionError, DoubleFree):
            harmed += 1
    assert harmed > 5
