"""A copy of the forest that is rebuilt from its records alone, for whoever looks from outside.

It knows the shape, the locks, ages, hits and sizes, and no token and no page. A record that cannot
follow what is known is refused, and everything after it, until a snapshot
(`ktserve.cache.snapshot`) says anew how things are.

A snapshot comes in slices between which the forest may go on, and a tree in as many parts as it
needs. A tree's records touch no other tree, so each tree counts from the record that came next when
its last part was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from ktserve.cache.records import Kind, Record, Why

# Plain numbers, since a member of an enumeration costs a lookup at each use.
_OPENED, _CLOSED, _GRAFTED = int(Kind.OPENED), int(Kind.CLOSED), int(Kind.GRAFTED)
_LEASED, _MOVED, _RELEASED = int(Kind.LEASED), int(Kind.MOVED), int(Kind.RELEASED)
_SPLIT, _INSERTED = int(Kind.SPLIT), int(Kind.INSERTED)
_LENGTHENED, _EVICTED = int(Kind.LENGTHENED), int(Kind.EVICTED)
_REPAIRED, _LOOKUP = int(Kind.REPAIRED), int(Why.LOOKUP)

_NONE: Mapping[int, ShadowNode] = MappingProxyType({})
"""The children of every leaf: most nodes are one, and need no dictionary of their own."""

_LOST = -1
"""No record has this number."""


class CannotFollow(RuntimeError):
    """A record does not fit what is known, or one is missing. Load a new snapshot."""


class NodeState(NamedTuple):
    """A node in a snapshot.

    Attributes:
        parent: the id of the node above; 0 of a root.
        public: of a root behind a public prefix its id; 0 of all others.
        tokens: of its edge.
    """

    id: int
    parent: int
    public: int
    tokens: int
    locks: int
    last_used: int
    created: int
    hits: int


class TreePart(NamedTuple):
    """Some nodes of a tree in a snapshot. A node in a later part is as it says there.

    Attributes:
        namespace: its index.
        tenant: its index.
        nodes: roots and others. Parents may come after their children.
        gone: ids from earlier parts that are no more.
        first: what earlier parts said of this tree does not count.
        last: with this part the tree is whole.
    """

    namespace: int
    tenant: int
    leases: int
    last_used: int
    nodes: list[NodeState]
    gone: list[int]
    first: bool
    last: bool


class Slice(NamedTuple):
    """A piece of a snapshot, during which nothing changed.

    Attributes:
        seq: the number of the first record that is not in it.
    """

    seq: int
    trees: list[TreePart]


class ShadowNode:
    """What is known of a node; its attributes are those of `ktserve.cache.node.Node`.

    Attributes:
        tokens: of its edge.
        children: by their ids.
    """

    __slots__ = (
        "children",
        "created",
        "hits",
        "id",
        "last_used",
        "locks",
        "parent",
        "tokens",
        "tree",
    )

    def __init__(
        self, node_id: int, tree: ShadowTree, parent: ShadowNode | None, tokens: int, tick: int
    ) -> None:
        self.id = node_id
        self.tree = tree
        self.parent = parent
        self.children = _NONE
        self.tokens = tokens
        self.locks = self.hits = 0
        self.last_used = self.created = tick

    @property
    def namespace(self) -> int:
        """The index of its namespace."""
        return self.tree.index


class ShadowTree:
    """What is known of a tree.

    Attributes:
        index: of its namespace.
        tenant: the index of its tenant.
        root: where prompts begin; it is made with the tree.
        grafts: further roots, by the id of the public prefix behind which they stand.
        resident: tokens in the tree.
        locked: those of them that a lease covers.
        nodes: without the roots.
        leases: leases on the tree, those that cover nothing among them.
        last_used: the tick of its last lease or release.
    """

    __slots__ = (
        "grafts",
        "index",
        "last_used",
        "leases",
        "locked",
        "nodes",
        "resident",
        "root",
        "tenant",
    )

    def __init__(self, index: int, tenant: int, root: int, tick: int) -> None:
        self.index = index
        self.tenant = tenant
        self.root = ShadowNode(root, self, None, 0, tick)
        self.grafts: dict[int, ShadowNode] = {}
        self.resident = self.locked = self.nodes = self.leases = 0
        self.last_used = tick


class Shadow:
    """The forest as the records tell it. It begins with none, before the first record.

    Attributes:
        seq: the number of the record that comes next; -1 while none can.
        trees: by the index of their namespace.
        nodes: by id, roots among them.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.trees: dict[int, ShadowTree] = {}
        self.nodes: dict[int, ShadowNode] = {}
        # While the records that came between the slices of a snapshot are applied: up to which
        # one, and from which on they count, by tree.
        self._settled = 0
        self._counts_from: dict[int, int] = {}
        # While a snapshot is loaded: where it began, and the trees that are not whole yet.
        self._begin = _LOST
        self._parts: dict[int, _Parts] = {}

    def apply(self, record: Record | tuple[int, ...]) -> None:
        """Follow one record.

        Raises:
            CannotFollow: it does not fit; nothing fits any more until `load`.
        """
        seq, kind, node, parent, namespace, tokens, reason, _, tick = record
        if seq != self.seq:
            self._refuse(seq)
        if seq >= self._settled or self._counts(seq, kind, namespace):
            self.seq = _LOST  # until it was followed: what is known may be half changed
            self._follow(kind, node, parent, namespace, tokens, reason, tick)
        self.seq = seq + 1

    def load(self, snapshot: Iterable[Slice]) -> None:
        """Forget everything and start from a whole snapshot; `seq` is then the record to go on at.

        Raises:
            CannotFollow: the snapshot is empty or contradicts itself.
        """
        self.begin()
        for part in snapshot:
            self.add(part)
        self.finish()

    def begin(self) -> None:
        """Forget everything: a snapshot comes. No record can be followed until `finish`."""
        self.seq = self._begin = _LOST
        self.trees, self.nodes = {}, {}
        self._counts_from = {}
        self._parts = {}

    def add(self, part: Slice) -> None:
        """Take in the next slice of the snapshot.

        Raises:
            CannotFollow: it contradicts itself.
        """
        seq, trees = part
        if self._begin == _LOST:
            self._begin = seq
        self._settled = seq
        for tree in trees:
            self._load_part(tree)
            if tree.last:
                self._counts_from[tree.namespace] = seq

    def finish(self) -> None:
        """The snapshot is complete; go on at the record `seq`, the first that came after its begin.

        Raises:
            CannotFollow: nothing was added.
        """
        if self._begin == _LOST:
            raise CannotFollow("a snapshot without a slice; take it anew")
        for index, parts in self._parts.items():
            # It was closed before it was told whole.
            for node_id in parts.nodes:
                del self.nodes[node_id]
            self.trees.pop(index, None)
        self._parts = {}
        self.seq = self._begin

    def _counts(self, seq: int, kind: int, namespace: int) -> bool:
        """Whether a record from the time of the snapshot tells something that is not in it."""
        since = self._counts_from.get(namespace)
        if since is not None:
            return seq >= since
        # Of a tree that was there before the snapshot and was gone before its turn: nothing.
        return kind in (_OPENED, _REPAIRED) or namespace in self.trees

    def _load_part(self, part: TreePart) -> None:
        index = part.namespace
        parts = self._parts.get(index)
        if part.first or parts is None:
            if parts is not None:
                for node_id in parts.nodes:
                    del self.nodes[node_id]
                self.trees.pop(index, None)
            parts = self._parts[index] = _Parts()
        tree = self.trees.get(index)
        for state in part.nodes:
            if tree is None:
                # The first node is the root where prompts begin.
                tree = ShadowTree(index, part.tenant, state.id, state.created)
                self._add_tree(tree)
                parts.nodes.add(state.id)
                _set_counts(tree.root, state)
            else:
                self._load_node(state, tree, parts)
        if tree is None:
            raise CannotFollow(f"tree {index} has a part without a root")
        for node_id in part.gone:
            self._unload(node_id, tree, parts)
        tree.leases, tree.last_used = part.leases, part.last_used
        if part.last:
            if parts.orphans:
                raise CannotFollow(f"tree {index} has nodes without the nodes above them")
            tree.nodes = len(parts.nodes) - 1 - len(tree.grafts)
            tree.resident, tree.locked = parts.resident, parts.locked
            del self._parts[index]

    def _load_node(self, state: NodeState, tree: ShadowTree, parts: _Parts) -> None:
        node = self.nodes.get(state.id)
        if node is None:
            if state.public:
                node = self._add_graft(state.id, tree, state.public, state.created)
            else:
                node = ShadowNode(state.id, tree, None, 0, state.created)
                self._add_node(node)
            parts.nodes.add(state.id)
        elif node.tree is not tree:
            raise CannotFollow(f"node {state.id} is in two trees")
        parts.count(node, -1)
        node.tokens = state.tokens
        _set_counts(node, state)
        parts.count(node, 1)
        if state.parent and (node.parent is None or node.parent.id != state.parent):
            if node.parent is not None:
                _cut(node)
            above = self.nodes.get(state.parent)
            if above is None:
                parts.orphans.setdefault(state.parent, {})[node.id] = node
            else:
                node.parent = above
                _children(above)[node.id] = node
        for child in parts.orphans.pop(node.id, {}).values():
            child.parent = node
            _children(node)[child.id] = child

    def _unload(self, node_id: int, tree: ShadowTree, parts: _Parts) -> None:
        node = self.nodes.get(node_id)
        if node is None or node.tree is not tree or node.children:
            raise CannotFollow(f"node {node_id} is gone from tree {tree.index}, and was no leaf")
        parts.count(node, -1)
        parts.nodes.discard(node_id)
        del self.nodes[node_id]
        _cut(node)
        for above, waiting in list(parts.orphans.items()):
            waiting.pop(node_id, None)
            if not waiting:
                del parts.orphans[above]

    def _follow(
        self, kind: int, node: int, parent: int, namespace: int, tokens: int, reason: int, tick: int
    ) -> None:
        if kind == _LEASED:
            self._leased(node, namespace, reason, tick)
        elif kind == _MOVED:
            self._moved(node, parent, namespace, tick)
        elif kind == _RELEASED:
            self._released(node, namespace, tick)
        elif kind == _EVICTED:
            self._evicted(node, parent, namespace, tokens)
        elif kind == _LENGTHENED:
            self._lengthened(node, namespace, tokens)
        elif kind == _INSERTED:
            self._inserted(node, parent, namespace, tokens, tick)
        elif kind == _SPLIT:
            self._split(node, parent, namespace, tokens)
        elif kind == _OPENED:
            self._opened(node, namespace, tokens, tick)
        elif kind == _CLOSED:
            self._closed(namespace)
        elif kind == _GRAFTED:
            self._grafted(node, parent, namespace, tokens, tick)
        elif kind == _REPAIRED:
            raise CannotFollow("the cache repaired its books; what was known does not count")
        else:
            raise CannotFollow(f"there is no kind {kind} of record")

    # One method for each kind of record.

    def _opened(self, node: int, namespace: int, tokens: int, tick: int) -> None:
        self._add_tree(ShadowTree(namespace, tokens, node, tick))

    def _closed(self, namespace: int) -> None:
        tree = self._tree(namespace)
        if tree.nodes or tree.leases:
            raise CannotFollow(
                f"tree {namespace} is closed with {tree.nodes} nodes and {tree.leases} leases"
            )
        del self.trees[namespace]
        del self.nodes[tree.root.id]
        for root in tree.grafts.values():
            del self.nodes[root.id]

    def _grafted(self, node: int, parent: int, namespace: int, tokens: int, tick: int) -> None:
        tree = self._tree(namespace)
        if parent != tree.root.id:
            raise CannotFollow(f"node {parent} is not the root of tree {namespace}")
        self._add_graft(node, tree, tokens, tick)

    def _leased(self, node: int, namespace: int, reason: int, tick: int) -> None:
        step: ShadowNode | None = self._find(node, namespace)
        tree = self.trees[namespace]
        hit = 1 if reason == _LOOKUP else 0
        newly = 0
        while step is not None:
            if not step.locks:
                newly += step.tokens
            step.locks += 1
            step.last_used = tick
            step.hits += hit
            step = step.parent
        tree.locked += newly
        tree.leases += 1
        tree.last_used = tick

    def _split(self, node: int, parent: int, namespace: int, tokens: int) -> None:
        lower = self._find(parent, namespace)
        above = lower.parent
        if above is None or not 0 < tokens < lower.tokens:
            raise CannotFollow(
                f"node {parent} with {lower.tokens} tokens is cut after {tokens} of them"
            )
        upper = self._add_child(node, above, tokens, lower.created)
        upper.last_used, upper.locks, upper.hits = lower.last_used, lower.locks, lower.hits
        tree = upper.tree
        tree.resident -= tokens  # they are the lower part's
        lower.tokens -= tokens
        lower.parent = upper
        del _children(above)[parent]
        _children(upper)[parent] = lower

    def _inserted(self, node: int, parent: int, namespace: int, tokens: int, tick: int) -> None:
        if tokens < 1:
            raise CannotFollow(f"node {node} is new and has {tokens} tokens")
        self._add_child(node, self._find(parent, namespace), tokens, tick)

    def _lengthened(self, node: int, namespace: int, tokens: int) -> None:
        leaf = self._find(node, namespace)
        if leaf.parent is None or leaf.children or tokens < 1:
            raise CannotFollow(f"node {node} cannot get {tokens} tokens more at its end")
        leaf.tokens += tokens
        tree = leaf.tree
        tree.resident += tokens
        if leaf.locks:
            tree.locked += tokens

    def _moved(self, node: int, parent: int, namespace: int, tick: int) -> None:
        old = self._find(parent, namespace)
        if not old.locks:
            raise CannotFollow(f"a lease leaves node {parent}, which has none")
        step: ShadowNode | None = self._find(node, namespace)
        newly = 0
        # A lease only moves down, so from its old end on upwards the locks stay as they are.
        while step is not old:
            if step is None:
                raise CannotFollow(f"a lease goes from node {parent} to {node}, not below it")
            if not step.locks:
                newly += step.tokens
            step.locks += 1
            step.last_used = tick
            step = step.parent
        while step is not None:
            step.last_used = tick
            step = step.parent
        tree = old.tree
        tree.locked += newly
        tree.last_used = tick

    def _released(self, node: int, namespace: int, tick: int) -> None:
        step: ShadowNode | None = self._find(node, namespace)
        tree = self.trees[namespace]
        freed = 0
        while step is not None:
            locks = step.locks - 1
            if locks < 1:
                if locks < 0:
                    raise CannotFollow(f"a lease at node {step.id} ends, which has none")
                freed += step.tokens
            step.locks = locks
            step.last_used = tick
            step = step.parent
        tree.locked -= freed
        tree.leases -= 1
        tree.last_used = tick

    def _evicted(self, node: int, parent: int, namespace: int, tokens: int) -> None:
        leaf = self._find(node, namespace)
        above = leaf.parent
        if above is None or above.id != parent:
            raise CannotFollow(f"node {node} is not below node {parent}")
        if leaf.locks or leaf.children or not 0 < tokens <= leaf.tokens:
            raise CannotFollow(
                f"node {node} with {leaf.tokens} tokens, {leaf.locks} locks and"
                f" {len(leaf.children)} children cannot lose {tokens} tokens"
            )
        leaf.tokens -= tokens
        tree = leaf.tree
        tree.resident -= tokens
        if not leaf.tokens:
            del self.nodes[node]
            _cut(leaf)
            tree.nodes -= 1

    # What they share.

    def _refuse(self, seq: int) -> NoReturn:
        expected, self.seq = self.seq, _LOST
        if expected == _LOST:
            raise CannotFollow(f"record {seq} comes after one that could not be followed")
        raise CannotFollow(f"record {seq} comes where {expected} should")

    def _tree(self, namespace: int) -> ShadowTree:
        tree = self.trees.get(namespace)
        if tree is None:
            raise CannotFollow(f"tree {namespace} is not known")
        return tree

    def _find(self, node_id: int, namespace: int) -> ShadowNode:
        node = self.nodes.get(node_id)
        if node is None or node.tree.index != namespace:
            raise CannotFollow(f"node {node_id} is not known in tree {namespace}")
        return node

    def _add_tree(self, tree: ShadowTree) -> None:
        if tree.index in self.trees:
            raise CannotFollow(f"tree {tree.index} is opened, and was open")
        self._add_node(tree.root)
        self.trees[tree.index] = tree

    def _add_graft(self, node_id: int, tree: ShadowTree, public: int, tick: int) -> ShadowNode:
        if public in tree.grafts:
            raise CannotFollow(f"tree {tree.index} has a root behind public prefix {public}")
        root = tree.grafts[public] = ShadowNode(node_id, tree, None, 0, tick)
        self._add_node(root)
        return root

    def _add_child(self, node_id: int, above: ShadowNode, tokens: int, tick: int) -> ShadowNode:
        node = ShadowNode(node_id, above.tree, above, tokens, tick)
        self._add_node(node)
        _children(above)[node_id] = node
        above.tree.resident += tokens
        above.tree.nodes += 1
        return node

    def _add_node(self, node: ShadowNode) -> None:
        if node.id in self.nodes:
            raise CannotFollow(f"node {node.id} is new, and was there")
        self.nodes[node.id] = node


def _children(node: ShadowNode) -> dict[int, ShadowNode]:
    """The children of ``node``, to add to and take from."""
    children = node.children
    if isinstance(children, dict):
        return children
    node.children = created = dict[int, ShadowNode]()
    return created


def _cut(node: ShadowNode) -> None:
    """Take ``node`` out of the children of the node above it."""
    above, node.parent = node.parent, None
    if above is not None:
        siblings = _children(above)
        del siblings[node.id]
        if not siblings:
            above.children = _NONE


class _Parts:
    """What was loaded of a tree that is not whole yet.

    Attributes:
        nodes: ids, those of roots among them.
        orphans: nodes by the id of the node above them, which has still to come.
        resident: tokens.
        locked: those of them under a lease.
    """

    __slots__ = ("locked", "nodes", "orphans", "resident")

    def __init__(self) -> None:
        self.nodes: set[int] = set()
        self.orphans: dict[int, dict[int, ShadowNode]] = {}
        self.resident = self.locked = 0

    def count(self, node: ShadowNode, times: int) -> None:
        self.resident += times * node.tokens
        if node.locks:
            self.locked += times * node.tokens


def _set_counts(node: ShadowNode, state: NodeState) -> None:
    node.locks, node.hits, node.last_used = state.locks, state.hits, state.last_used
