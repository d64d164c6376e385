"""What each tenant holds of the pool, what it may hold, and who gives up the next page.

A tenant *holds* the pages of its trees and the private pages of its running sequences. It has a
*floor*: no other tenant's request takes from it what it holds up to there. And it has a *cap*: it
never holds more. The three ways of sharing differ in these two numbers and in whom they ask first:

============  =====================  ==========  ===============================================
mode          floor                  cap         who gives up a page
============  =====================  ==========  ===============================================
shared        0                      the pool    whoever has the first victim by the policy
floors        half the share         the pool    above its floor, the greatest
                                                 ``age / (0.005 + hit rate)`` of the first victim
partitioned   the share              the share   the tenant that needs it
============  =====================  ==========  ===============================================

Where nobody has anything above its floor, a tenant gives up its own. The rule of ``floors`` follows
Memshare (Cidon et al., ATC'17) in its reserved and shared parts, with one moving average for each
tenant where that work estimates marginal gains.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from ktserve.cache.ghosts import Ghosts
from ktserve.cache.node import Node, Tree
from ktserve.cache.policies import POLICIES, EvictionPolicy
from ktserve.cache.victims import Victims
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing, Share, divide
from ktserve.tenancy.tenant import Quota

PUBLIC_TENANT = "@public"
"""Holds the public prefixes. No tenant can have this name: '@' is not allowed in one."""

HIT_RATE_STEP = 0.05
"""How much of a tenant's moving average one request's hit rate makes."""

_LEAST_HIT_RATE = 0.005
"""Keeps the age of a tenant that never hits finite."""


_TREES_CHECKED = 64
"""Namespaces of one tenant up to which `Accounts.sound` looks at each; it runs at every step."""


class Room(NamedTuple):
    """What a tenant could get now, in pages; the lesser of the two counts.

    Attributes:
        own: below its cap, with what it could evict of its own.
        pool: in the whole pool.
    """

    own: int
    pool: int


class Account:
    """One tenant's pages.

    Attributes:
        index: a number for records.
        quota: as the operator gave it.
        share: what it comes to, in pages.
        resident: pages in its trees.
        locked: those of them under a lease.
        private: pages of its running sequences that are in no tree (yet).
        spare: pages that others may take: evictable, and held above the floor.
        nodes: in its trees, without roots.
        trees: its namespaces.
        victims: its free leaves, in order.
        ghosts: what it lost lately.
        hit_rate: moving average over its requests of the share of the prompt that was found.
        lookups: requests that were looked up.
        hits: those that found something.
        hit_tokens: tokens that they found.
        prompt_tokens: tokens that they asked for.
        evicted: pages that it lost.
        caused: pages that its requests evicted, its own among them.
        evicted_by: pages that it lost, by the tenant whose request took them; "" is for nobody's.
    """

    __slots__ = (
        "caused",
        "evicted",
        "evicted_by",
        "ghosts",
        "hit_rate",
        "hit_tokens",
        "hits",
        "index",
        "locked",
        "lookups",
        "nodes",
        "private",
        "prompt_tokens",
        "quota",
        "resident",
        "share",
        "spare",
        "tenant",
        "trees",
        "victims",
    )

    def __init__(
        self, tenant: str, index: int, quota: Quota, share: Share, key: Callable[[Node], int]
    ) -> None:
        self.tenant = tenant
        self.index = index
        self.quota = quota
        self.share = share
        self.resident = self.locked = self.private = self.spare = self.nodes = 0
        self.trees: dict[Namespace, Tree] = {}
        self.hit_rate = 0.0
        self.lookups = self.hits = self.hit_tokens = self.prompt_tokens = 0
        self.evicted = self.caused = 0
        self.evicted_by: Counter[str] = Counter()
        self.victims = Victims(key)
        self.ghosts = Ghosts()

    @property
    def held(self) -> int:
        """Pages that count against the share."""
        return self.resident + self.private

    @property
    def evictable(self) -> int:
        """Pages that no lease covers."""
        return self.resident - self.locked


class Accounts:
    """Every tenant's account over one pool.

    Args:
        pages: of the pool.
        reserved: those of them that are kept for public prefixes.

    Attributes:
        key: the policy, as a number for each node.
        resident: pages in all trees.
        locked: those of them under a lease.
        private: pages of running sequences alone.
        spare: the accounts' spare pages together.
        evicted: pages that were given up for requests.
        floors: all floors together, that of the public prefixes among them.
    """

    def __init__(
        self,
        pages: int,
        *,
        sharing: CacheSharing,
        policy: EvictionPolicy,
        quotas: Mapping[str, Quota],
        reserved: int = 0,
    ) -> None:
        self.pages = pages
        self.sharing = sharing
        self.key = POLICIES[policy]
        self.resident = self.locked = self.private = self.spare = self.floors = 0
        self.evicted = 0
        self._reserved = reserved
        self._accounts: dict[str, Account] = {}
        self._givers: set[Account] = set()
        self._shares: dict[str, Share] = {}
        self._quotas: dict[str, Quota] = {}
        self.set_quotas(quotas, self.divide(quotas))

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self.pages - self.resident - self.private

    @property
    def evictable(self) -> int:
        """Pages in trees that no lease covers."""
        return self.resident - self.locked

    def of(self, tenant: str) -> Account:
        """The account of ``tenant``, made when it is first asked for."""
        account = self._accounts.get(tenant)
        if account is None:
            quota = self._quotas.get(tenant, Quota())
            account = Account(tenant, len(self._accounts), quota, self._share(tenant), self.key)
            self._accounts[tenant] = account
        return account

    def divide(self, quotas: Mapping[str, Quota]) -> dict[str, Share]:
        """What ``quotas`` come to; changes nothing.

        Raises:
            ValueError: they cannot be had together.
        """
        return divide(self.sharing, self.pages - self._reserved, quotas)

    def set_quotas(self, quotas: Mapping[str, Quota], shares: dict[str, Share]) -> None:
        """Divide the pool anew. Who holds more than it now may keeps it until it is taken.

        Args:
            shares: what `divide` made of ``quotas``.
        """
        self._quotas, self._shares = dict(quotas), shares
        self._share_out()
        for account in self:
            self.change(account)

    def rooms(self, account: Account) -> Room:
        """Pages that ``account`` could get now, by taking free ones and evicting."""
        own = account.evictable
        return Room(
            account.share.cap - account.held + own, self.free + own + self.spare - account.spare
        )

    def may_take(self, taker: Account, giver: Account) -> bool:
        """Whether a page that ``giver`` lets go of can come to ``taker``."""
        if taker is giver:
            return True
        return giver.held > giver.share.floor and self.rooms(taker).own > 0

    def change(
        self, account: Account, resident: int = 0, locked: int = 0, private: int = 0
    ) -> None:
        """Add to an account's counts and to the totals."""
        account.resident += resident
        account.locked += locked
        account.private += private
        self.resident += resident
        self.locked += locked
        self.private += private
        evictable = account.resident - account.locked
        above = account.resident + account.private - account.share.floor
        spare = max(0, min(evictable, above))
        if spare == account.spare:
            return
        if not spare:
            self._givers.discard(account)
        elif not account.spare:
            self._givers.add(account)
        self.spare += spare - account.spare
        account.spare = spare

    def givers(self) -> Set[Account]:
        """Who has spare pages, for audits."""
        return self._givers

    def offers(self, taker: Account, tick: int) -> Iterator[tuple[Account, int]]:
        """Who gives up the next pages for a request of ``taker``, and at most how many.

        The caller takes some before it asks again; all tenants are looked at once.

        Args:
            tick: now, for ages.
        """
        order: list[tuple[float, int, Account]] = []
        for account in self._givers:
            if (node := account.victims.first()) is not None:
                order.append((-self.rank(account, node, tick), account.index, account))
        heapq.heapify(order)
        while order:
            account = order[0][2]
            yield account, account.spare
            node = account.victims.first() if account.spare else None
            if node is None:
                heapq.heappop(order)
            else:
                rank = -self.rank(account, node, tick)
                heapq.heapreplace(order, (rank, account.index, account))
        while taker.evictable:
            yield taker, taker.evictable

    def rank(self, account: Account, first: Node, tick: int) -> float:
        """How soon ``account`` is to give up ``first``, its next victim: the highest goes first."""
        if self.sharing == "shared":
            return -self.key(first)
        return (tick - first.last_used) / (_LEAST_HIT_RATE + account.hit_rate)

    def sound(self, turn: int) -> bool:
        """Whether the counts of one account, another at each turn, can be right."""
        if not self._accounts:
            return True
        account = list(self._accounts.values())[turn % len(self._accounts)]
        spare = min(account.evictable, account.held - account.share.floor)
        if (
            not 0 <= account.locked <= account.resident <= self.resident
            or not 0 <= account.private <= self.private
            or account.spare != max(0, spare)
        ):
            return False
        if len(account.trees) > _TREES_CHECKED:
            return True
        trees = account.trees.values()
        return account.resident == sum(tree.resident for tree in trees) and all(
            tree.leases == sum(root.locks for root in tree.roots()) for tree in trees
        )

    def recount(self) -> None:
        """Set the accounts' counts of pages to those of their trees; none are private then."""
        self._share_out()
        self.resident = self.locked = self.private = self.spare = 0
        self._givers.clear()
        for account in self:
            trees = account.trees.values()
            account.resident = account.locked = account.private = account.spare = 0
            account.nodes = sum(tree.nodes for tree in trees)
            resident, locked = (sum(t.resident for t in trees), sum(t.locked for t in trees))
            self.change(account, resident, locked)

    def note_lookup(self, tree: Tree, prompt_tokens: int, hit_tokens: int) -> None:
        """Count a request's lookup, for its tenant and its namespace."""
        account = tree.account
        # The whole before its parts, so that a part never exceeds it.
        counted: tuple[Account | Tree, ...] = (account, tree)
        for counts in counted:
            counts.lookups += 1
            counts.prompt_tokens += prompt_tokens
            counts.hits += hit_tokens > 0
            counts.hit_tokens += hit_tokens
        account.hit_rate += HIT_RATE_STEP * (hit_tokens / prompt_tokens - account.hit_rate)

    def _share_out(self) -> None:
        """Give every account what `divide` found."""
        self.floors = self._reserved + sum(share.floor for share in self._shares.values())
        for account in self:
            account.quota = self._quotas.get(account.tenant, Quota())
            account.share = self._share(account.tenant)

    def _share(self, tenant: str) -> Share:
        if tenant == PUBLIC_TENANT:
            return Share(self._reserved, self._reserved, self._reserved)
        share = self._shares.get(tenant)
        if share is not None:
            return share
        # Who is not declared gets what the others leave, and keeps nothing from them.
        cap = 0 if self.sharing == "partitioned" else self.pages - self._reserved
        return Share(0, cap, min(cap, self.pages - self.floors))
