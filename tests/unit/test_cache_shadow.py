"""The shadow follows what fits and refuses what does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.cache.records import Kind, Record, Records, Why
from ktserve.cache.shadow import CannotFollow, Shadow, Slice
from ktserve.cache.snapshot import snapshot
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import pack

ROOT, TOP, LEAF, UPPER, GRAFT = 1, 2, 3, 4, 5
TREE = 7


class Feed:
    """A shadow and the records for it, numbered."""

    def __init__(self) -> None:
        self.shadow = Shadow()
        self.tick = 100

    def __call__(
        self,
        kind: int,
        node: int = 0,
        parent: int = 0,
        tokens: int = 0,
        reason: int = 0,
        namespace: int = TREE,
    ) -> None:
        self.tick += 1
        seq = self.shadow.seq
        self.shadow.apply(Record(seq, kind, node, parent, namespace, tokens, reason, 0, self.tick))

    def locks(self) -> dict[int, int]:
        return {node.id: node.locks for node in self.shadow.nodes.values()}

    def counts(self) -> tuple[int, int, int, int]:
        tree = self.shadow.trees[TREE]
        return tree.resident, tree.locked, tree.nodes, tree.leases


def grown() -> Feed:
    """Root - TOP (8 tokens) - LEAF (4 tokens), no lease."""
    feed = Feed()
    feed(Kind.OPENED, ROOT, tokens=2)
    feed(Kind.INSERTED, TOP, ROOT, tokens=8)
    feed(Kind.INSERTED, LEAF, TOP, tokens=4)
    return feed


@pytest.fixture
def feed() -> Feed:
    return grown()


def test_an_opened_tree_is_its_tenants(feed: Feed) -> None:
    tree = feed.shadow.trees[TREE]
    assert (tree.index, tree.tenant, tree.root.id, tree.root.created) == (TREE, 2, ROOT, 101)
    assert feed.counts() == (12, 0, 2, 0)
    assert feed.shadow.nodes[LEAF].namespace == TREE


def test_a_lookup_locks_touches_and_hits_its_path(feed: Feed) -> None:
    feed(Kind.LEASED, TOP, tokens=8, reason=Why.LOOKUP)
    nodes = feed.shadow.nodes
    assert feed.locks() == {ROOT: 1, TOP: 1, LEAF: 0}
    assert [nodes[n].last_used for n in (ROOT, TOP, LEAF)] == [feed.tick, feed.tick, 103]
    assert [nodes[n].hits for n in (ROOT, TOP, LEAF)] == [1, 1, 0]
    assert feed.counts() == (12, 8, 2, 1)
    assert feed.shadow.trees[TREE].last_used == feed.tick


@pytest.mark.parametrize("reason", [Why.RESUMED, Why.PINNED])
def test_what_is_no_lookup_is_no_hit(feed: Feed, reason: int) -> None:
    feed(Kind.LEASED, TOP, tokens=8, reason=reason)
    assert feed.shadow.nodes[TOP].hits == 0
    assert feed.locks()[TOP] == 1


def test_a_release_takes_the_locks_back_and_counts_as_use(feed: Feed) -> None:
    feed(Kind.LEASED, LEAF, reason=Why.LOOKUP)
    feed(Kind.LEASED, TOP, reason=Why.LOOKUP)
    feed(Kind.RELEASED, LEAF)
    assert feed.locks() == {ROOT: 1, TOP: 1, LEAF: 0}
    assert feed.shadow.nodes[LEAF].last_used == feed.tick
    assert feed.counts() == (12, 8, 2, 1)


def test_a_move_locks_what_is_new_and_keeps_what_was(feed: Feed) -> None:
    feed(Kind.LEASED, TOP, reason=Why.LOOKUP)
    feed(Kind.MOVED, LEAF, TOP)
    assert feed.locks() == {ROOT: 1, TOP: 1, LEAF: 1}
    assert {node.last_used for node in feed.shadow.nodes.values()} == {feed.tick}
    assert feed.shadow.nodes[LEAF].hits == 0
    assert feed.counts() == (12, 12, 2, 1)


def test_a_split_leaves_the_lower_part_its_id_and_both_the_rest(feed: Feed) -> None:
    feed(Kind.LEASED, TOP, reason=Why.LOOKUP)
    used = feed.tick
    feed(Kind.SPLIT, UPPER, TOP, tokens=3)
    nodes = feed.shadow.nodes
    upper, lower = nodes[UPPER], nodes[TOP]
    assert (upper.tokens, lower.tokens) == (3, 5)
    assert (upper.parent, lower.parent) == (nodes[ROOT], upper)
    assert (dict(nodes[ROOT].children), dict(upper.children)) == ({UPPER: upper}, {TOP: lower})
    for part in (upper, lower):
        assert (part.locks, part.hits, part.last_used, part.created) == (1, 1, used, 102)
    assert feed.counts() == (12, 8, 3, 1)


def test_a_leaf_grows_in_place(feed: Feed) -> None:
    feed(Kind.LEASED, LEAF, reason=Why.LOOKUP)
    feed(Kind.LENGTHENED, LEAF, tokens=6)
    assert feed.shadow.nodes[LEAF].tokens == 10
    assert feed.counts() == (18, 18, 2, 1)


def test_a_leaf_shrinks_and_goes_when_nothing_is_left(feed: Feed) -> None:
    feed(Kind.EVICTED, LEAF, TOP, tokens=1)
    assert (feed.shadow.nodes[LEAF].tokens, feed.counts()) == (3, (11, 0, 2, 0))
    feed(Kind.EVICTED, LEAF, TOP, tokens=3)
    assert LEAF not in feed.shadow.nodes
    assert not feed.shadow.nodes[TOP].children
    assert feed.counts() == (8, 0, 1, 0)


def test_a_closed_tree_leaves_nothing(feed: Feed) -> None:
    feed(Kind.GRAFTED, GRAFT, ROOT, tokens=9)
    assert feed.shadow.trees[TREE].grafts == {9: feed.shadow.nodes[GRAFT]}
    feed(Kind.EVICTED, LEAF, TOP, tokens=4)
    feed(Kind.EVICTED, TOP, ROOT, tokens=8)
    feed(Kind.CLOSED)
    assert (feed.shadow.trees, feed.shadow.nodes) == ({}, {})


NONSENSE: dict[str, dict[str, int]] = {
    "an unknown kind": {"kind": 99},
    "an unknown node": {"kind": Kind.LEASED, "node": 50},
    "a node of another tree": {"kind": Kind.LEASED, "node": TOP, "namespace": 8},
    "a tree that is open": {"kind": Kind.OPENED, "node": 50},
    "a root that is there": {"kind": Kind.OPENED, "node": ROOT, "namespace": 8},
    "an unknown tree": {"kind": Kind.CLOSED, "namespace": 8},
    "a tree with nodes": {"kind": Kind.CLOSED},
    "a graft on no root": {"kind": Kind.GRAFTED, "node": 50, "parent": TOP, "tokens": 9},
    "a cut of nothing": {"kind": Kind.SPLIT, "node": 50, "parent": TOP, "tokens": 0},
    "a cut at the end": {"kind": Kind.SPLIT, "node": 50, "parent": TOP, "tokens": 8},
    "a cut root": {"kind": Kind.SPLIT, "node": 50, "parent": ROOT, "tokens": 1},
    "a new node that is there": {"kind": Kind.INSERTED, "node": LEAF, "parent": TOP, "tokens": 1},
    "a new node without tokens": {"kind": Kind.INSERTED, "node": 50, "parent": TOP},
    "a new node below none": {"kind": Kind.INSERTED, "node": 50, "parent": 51, "tokens": 1},
    "a longer inner node": {"kind": Kind.LENGTHENED, "node": TOP, "tokens": 1},
    "a leaf longer by nothing": {"kind": Kind.LENGTHENED, "node": LEAF},
    "a move without a lease": {"kind": Kind.MOVED, "node": LEAF, "parent": TOP},
    "a release without a lease": {"kind": Kind.RELEASED, "node": LEAF},
    "more evicted than there is": {"kind": Kind.EVICTED, "node": LEAF, "parent": TOP, "tokens": 5},
    "nothing evicted": {"kind": Kind.EVICTED, "node": LEAF, "parent": TOP},
    "an inner node evicted": {"kind": Kind.EVICTED, "node": TOP, "parent": ROOT, "tokens": 1},
    "evicted from elsewhere": {"kind": Kind.EVICTED, "node": LEAF, "parent": ROOT, "tokens": 1},
    "repaired": {"kind": Kind.REPAIRED, "namespace": 0},
}


@pytest.mark.parametrize("record", NONSENSE.values(), ids=NONSENSE)
def test_what_does_not_fit_is_refused_and_all_after_it(feed: Feed, record: dict[str, int]) -> None:
    seq = feed.shadow.seq
    with pytest.raises(CannotFollow):
        feed(**record)
    assert feed.shadow.seq == -1
    fitting = Record(seq, Kind.LEASED, LEAF, 0, TREE, 12, Why.LOOKUP, 0, 999)
    with pytest.raises(CannotFollow, match="after one that could not be followed"):
        feed.shadow.apply(fitting._replace(seq=seq + 1))
    grown().shadow.apply(fitting)


@pytest.mark.parametrize("kind", [Kind.EVICTED, Kind.CLOSED, Kind.MOVED])
def test_a_lease_is_in_the_way(feed: Feed, kind: Kind) -> None:
    feed(Kind.LEASED, LEAF, reason=Why.LOOKUP)
    wrong = {
        Kind.EVICTED: {"node": LEAF, "parent": TOP, "tokens": 1},
        Kind.CLOSED: {},
        Kind.MOVED: {"node": TOP, "parent": LEAF},  # a lease moves down alone
    }
    with pytest.raises(CannotFollow):
        feed(kind, **wrong[kind])


@pytest.mark.parametrize("step", [-1, 1])
def test_a_gap_or_a_repetition_is_refused(feed: Feed, step: int) -> None:
    seq = feed.shadow.seq
    record = Record(seq, Kind.LEASED, LEAF, 0, TREE, 12, Why.LOOKUP, 0, 999)
    with pytest.raises(CannotFollow, match=f"record {seq + step} comes where {seq} should"):
        feed.shadow.apply(record._replace(seq=seq + step))


# Snapshots.


def namespace(tenant: str) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=None, extra_key=None, adapter=None)


class Server:
    """A cache with three namespaces."""

    def __init__(self) -> None:
        self.records = Records()
        self.cache = CacheManager(PagePool(1000), 1, records=self.records)
        for tenant in ("a", "b", "c"):
            self.serve(tenant, range(10))

    def serve(self, tenant: str, tokens: range) -> None:
        table = self.cache.open(namespace(tenant), pack(tokens))
        assert self.cache.grow(table, len(tokens))
        self.cache.close(table, pack(tokens))

    def slices(self) -> list[Slice]:
        return list(snapshot(self.cache.forest, self.records))

    def caught_up(self, shadow: Shadow) -> bool:
        for record in self.records.since(shadow.seq)[0]:
            shadow.apply(record)
        trees = {tree.index: tree for tree in self.cache.forest.trees()}
        return {
            (tree.index, tree.resident, tree.nodes, tree.last_used)
            for tree in shadow.trees.values()
        } == {(tree.index, tree.resident, tree.nodes, tree.last_used) for tree in trees.values()}


def test_a_snapshot_mends_a_shadow_that_lost_track() -> None:
    server, shadow = Server(), Shadow()
    for record in server.records.since(0)[0]:
        shadow.apply(record)
    server.cache.repair()
    server.serve("a", range(20))
    with pytest.raises(CannotFollow, match="repaired"):
        server.caught_up(shadow)
    shadow.load(server.slices())
    server.serve("b", range(5))
    assert server.caught_up(shadow)


def test_a_repair_in_the_middle_of_a_snapshot_spoils_it() -> None:
    server, shadow = Server(), Shadow()
    parts = []
    for number, part in enumerate(snapshot(server.cache.forest, server.records, nodes=1)):
        if number == 2:
            server.cache.repair()
        parts.append(part)
    shadow.load(parts)
    with pytest.raises(CannotFollow, match="repaired"):
        server.caught_up(shadow)


def test_trees_that_come_and_go_during_a_snapshot() -> None:
    server, shadow = Server(), Shadow()
    parts = []
    flushed = False
    for part in snapshot(server.cache.forest, server.records, nodes=1):
        parts.append(part)
        if any(tree.last for tree in part.trees) and not flushed:
            # The tree of "a" is told, those of "b" and "c" are not yet.
            flushed = True
            server.cache.flush(namespace("a"))
            server.cache.flush(namespace("b"))
            server.serve("c", range(12))
            server.serve("d", range(4))
            server.cache.flush(namespace("d"))
            server.serve("e", range(4))
    told = [[tree.namespace for tree in part.trees if tree.last] for part in parts]
    assert [trees for trees in told if trees] == [[1], [3]]
    shadow.load(parts)
    assert server.caught_up(shadow)
    assert len(shadow.trees) == 2


def test_after_a_snapshot_an_unknown_tree_is_refused_again() -> None:
    server, shadow = Server(), Shadow()
    shadow.load(server.slices())
    with pytest.raises(CannotFollow, match="tree 50 is not known"):
        shadow.apply(Record(shadow.seq, Kind.CLOSED, 0, 0, 50, 0, 0, 0, 1))


def test_half_a_snapshot_is_refused() -> None:
    shadow = Shadow()
    with pytest.raises(CannotFollow, match="without a slice"):
        shadow.load([])
    assert shadow.seq == -1
    slices = Server().slices()
    tree = slices[-1].trees[0]
    orphan = tree.nodes[-1]._replace(parent=77)
    broken = tree._replace(nodes=[tree.nodes[0], orphan])
    with pytest.raises(CannotFollow, match="nodes without the nodes above"):
        shadow.load([Slice(9, [broken])])
    shadow.load(slices)
    assert shadow.seq == slices[0].seq


def test_a_process_that_loads_the_shadow_loads_neither_numpy_nor_torch() -> None:
    code = (
        "import sys\n"
        "import ktserve.cache.shadow\n"
        "print(sorted({'numpy', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
