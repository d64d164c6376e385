"""What the forest is made of: nodes, the tree of one namespace, and leases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ktserve.tenancy.namespace import Namespace

if TYPE_CHECKING:
    from ktserve.cache.accounts import Account

PAGE_ID_BYTES = 8
"""Page ids are kept as packed int64: the memory of a numpy array without the array's own."""

NO_CHILDREN: Mapping[bytes, Node] = MappingProxyType({})
"""Of every leaf. Most nodes are one, and a dictionary of its own would cost each 64 bytes."""


class Node:
    """One edge of a tree and the point it leads to.

    Attributes:
        id: unique in a life of the engine, never used again.
        key: the edge's tokens, whole pages of them; empty at a root.
        pages: where their keys and values are: packed int64, one for each page.
        children: by the first page of their keys.
        locks: leases at this node or below it.
        last_used: the tick of the last lease that reached it; never older than a child's.
        created: the tick at which its first page came.
        hits: lookups that reached it.
        priority: the highest that a request through it asked for.
        queued: where it stands in its account's order of victims; None where it does not.
        before: its neighbours there, in a run.
        after:
        gone: it was evicted or flushed.
    """

    __slots__ = (
        "after",
        "before",
        "children",
        "created",
        "gone",
        "hits",
        "id",
        "key",
        "last_used",
        "locks",
        "pages",
        "parent",
        "priority",
        "queued",
        "tree",
    )

    def __init__(
        self,
        tree: Tree,
        node_id: int,
        key: bytes,
        pages: bytes,
        parent: Node | None,
        tick: int,
    ) -> None:
        self.tree = tree
        self.id = node_id
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children = NO_CHILDREN
        self.locks = 0
        self.last_used = tick
        self.created = tick
        self.hits = 0
        self.priority = 0
        self.queued: Run | Waiting | None = None
        self.before: Node | None = None
        self.after: Node | None = None
        self.gone = False

    @property
    def size(self) -> int:
        """Pages of the edge."""
        return len(self.pages) // PAGE_ID_BYTES

    def mutable_children(self) -> dict[bytes, Node]:
        """`children`, to add to."""
        children = self.children
        if isinstance(children, dict):
            return children
        self.children = created = dict[bytes, Node]()
        return created


class Run:
    """Free leaves of one rank one after the other, linked by their `before` and `after`."""

    __slots__ = ("first", "last", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.first: Node | None = None
        self.last: Node | None = None

    def __iter__(self) -> Iterator[Node]:
        node = self.first
        while node is not None:
            yield node
            node = node.after


Waiting = tuple[int, int, Node]
"""A free leaf in a heap: the policy's number, its id, itself."""


class Tree:
    """The prefixes of one namespace.

    Attributes:
        index: a number for records; no other namespace gets it in a life of the engine.
        root: where prompts begin.
        grafts: further roots, by the id of the public prefix behind which they stand.
        resident: pages in the tree.
        locked: those of them that a lease covers.
        nodes: without the roots.
        leases: leases on the tree, those that cover nothing among them.
        last_used: the tick of its last lease or release.
        lookups: requests that were looked up in it.
        hits: those that found something.
        hit_tokens: tokens that they found.
        prompt_tokens: tokens that they asked for.
        evicted: pages that it lost to eviction, a flush or its time to live.
        caused: pages that its requests evicted, its own among them.
    """

    __slots__ = (
        "account",
        "caused",
        "evicted",
        "grafts",
        "hit_tokens",
        "hits",
        "index",
        "last_used",
        "leases",
        "locked",
        "lookups",
        "namespace",
        "nodes",
        "prompt_tokens",
        "resident",
        "root",
    )

    def __init__(
        self, namespace: Namespace, account: Account, index: int, root_id: int, tick: int
    ) -> None:
        self.namespace = namespace
        self.account = account
        self.index = index
        self.root = Node(self, root_id, b"", b"", None, tick)
        self.grafts: dict[int, Node] = {}
        self.resident = self.locked = self.nodes = self.leases = 0
        self.last_used = tick
        self.lookups = self.hits = self.hit_tokens = self.prompt_tokens = 0
        self.evicted = self.caused = 0

    def roots(self) -> Iterator[Node]:
        """The root, and those of grafts."""
        yield self.root
        yield from self.grafts.values()

    def walk(self) -> Iterator[Node]:
        """Every node but the roots, parents first; changes nothing."""
        stack = [child for root in self.roots() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Lease:
    """A right to read the pages of a prefix: while it is held, none of them can be evicted.

    Attributes:
        node: where the prefix ends.
        length: pages of the prefix from the prompt's first token on, those of a public prefix
            before it among them.
        request: the id of the request that holds it.
        held: it was not released yet.
    """

    __slots__ = ("held", "length", "node", "request")

    def __init__(self, node: Node, length: int, request: int) -> None:
        self.node = node
        self.length = length
        self.request = request
        self.held = True


class Place(NamedTuple):
    """Where a walk ended.

    Attributes:
        node: the last node that was matched whole.
        at: the byte of the prompt where it ends.
        child: the node after it that was matched in part, if any.
        common: how many of its bytes, whole tokens.
    """

    node: Node
    at: int
    child: Node | None
    common: int


def path_pages(node: Node) -> bytes:
    """The pages of the prefix that ends at ``node``, packed, in order."""
    parts: list[bytes] = []
    step: Node | None = node
    while step is not None:
        parts.append(step.pages)
        step = step.parent
    return b"".join(reversed(parts))


def path_length(node: Node) -> int:
    """Pages of the prefix that ends at ``node``."""
    packed = 0
    step: Node | None = node
    while step is not None:
        packed += len(step.pages)
        step = step.parent
    return packed // PAGE_ID_BYTES
