"""Replaying a trace through the prefix cache: who finds how much, and who evicts whom.

No model runs. Requests come one after the other in order of time, and each does with the cache what
a sequence does: its prompt is looked up, pages are taken for what was not found, the whole prompt
is put into the tree, and the lease ends. The cache's clock is that of the trace. A block of the
trace is one page. What a prompt has beyond its blocks, and answers, are not in a trace; the last
block of a Mooncake prompt may be part of one, and counts as a whole.

A request that needs more pages than its tenant can ever have (`Share.capacity`) is cut to that
length: what is cut off counts as asked for and not found. A server would refuse it. The tally says
how many these were.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product

import numpy as np

from ktserve.bench.traces import PAGE_TOKENS, BlockIds, Trace, TraceRequest, page_tokens
from ktserve.cache.manager import CacheManager
from ktserve.cache.policies import EvictionPolicy
from ktserve.cache.pool import PagePool
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import TOKEN_BYTES

SCANNER = "scanner"
"""The tenant whose prompts never come again."""

_NANOSECONDS = 1_000_000_000
_LAST_TOKEN = bytes(TOKEN_BYTES)
"""A prompt's last token is never looked up, since it must be computed; so that its last block is,
one token more comes behind it."""


class NoPages(ValueError):
    """A tenant would have no page at all; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is replayed.

    Attributes:
        pages: sizes of the pool.
        sharing: modes.
        policies: of eviction.
        tenants: among whom the roots are dealt out; 0 makes each root a tenant.
        spread: seconds within which the roots begin, where each has a clock of its own.
        scans: the scanner's requests for each other one, in the middle half of the trace.
        scanner_share: its weight's part of all weights; the other tenants have the same weight.
        seeds: of the dealing out and of when roots begin, 0 and on; each gives a replay.
    """

    pages: tuple[int, ...]
    sharing: tuple[CacheSharing, ...] = ("shared", "floors", "partitioned")
    policies: tuple[EvictionPolicy, ...] = ("lru",)
    tenants: int = 5
    spread: float = 600.0
    scans: int = 2
    scanner_share: float = 0.1
    seeds: int = 5


@dataclass(frozen=True)
class Turn:
    """A request as the cache sees it.

    Attributes:
        at: nanoseconds.
        prompt: packed tokens of its pages, and one token more.
        pages: whole ones in the prompt.
    """

    at: int
    tenant: str
    prompt: bytes
    pages: int


@dataclass
class Tally:
    """What became of one tenant's requests.

    Attributes:
        requests: how many they were.
        asked: pages of its prompts.
        found: those of them that were in the cache.
        cut_requests: requests that were too long for the tenant.
        cut: pages that were cut off them; they are among ``asked``.
        evicted_by: pages that it lost, by the tenant whose request took them.
    """

    requests: int = 0
    asked: int = 0
    found: int = 0
    cut_requests: int = 0
    cut: int = 0
    evicted_by: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """The share of its pages that was found."""
        return found_of_asked([self])


@dataclass(frozen=True)
class Replayed:
    """One replay and its tallies by tenant."""

    pages: int
    sharing: CacheSharing
    policy: EvictionPolicy
    scanner: bool
    seed: int
    tenants: dict[str, Tally]

    @property
    def hit_rate(self) -> float:
        """The share of the interactive tenants' pages that was found: all but the scanner's."""
        return found_of_asked(list(self._interactive.values()))

    @property
    def lost_to_others(self) -> int:
        """Pages that interactive tenants lost to requests of another tenant."""
        return sum(
            pages
            for victim, tally in self._interactive.items()
            for taker, pages in tally.evicted_by.items()
            if taker != victim
        )

    @property
    def cut_requests(self) -> int:
        """The interactive tenants' requests that were too long for them."""
        return sum(tally.cut_requests for tally in self._interactive.values())

    @property
    def _interactive(self) -> dict[str, Tally]:
        return {name: tally for name, tally in self.tenants.items() if name != SCANNER}


def found_of_asked(tallies: Sequence[Tally]) -> float:
    """Pages found of those asked for; 0 where none were."""
    asked = sum(tally.asked for tally in tallies)
    return sum(tally.found for tally in tallies) / asked if asked else 0.0


def best_possible(turns: Sequence[Turn]) -> float:
    """The hit rate of a cache that never has to evict; nothing here can be better."""
    pages = max(1, sum(turn.pages for turn in turns))
    quotas = {turn.tenant: Quota() for turn in turns}
    tallies = replay(turns, pages=pages, sharing="shared", policy="lru", quotas=quotas)
    return found_of_asked(list(tallies.values()))


def measure(trace: Trace, plan: Plan, progress: Callable[[str], None]) -> Iterator[Replayed]:
    """Replay ``trace`` in every way of ``plan``, quiet and with the scanner.

    The ways of one seed come together, then those of the next.
    """
    for seed in range(plan.seeds):
        quiet = turns_of(trace, plan, seed)
        scanned = with_scanner(quiet, plan.scans)
        ways = product(plan.pages, plan.sharing, plan.policies, (False, True))
        for pages, sharing, policy, scanner in ways:
            progress(
                f"{trace.name}, seed {seed}: {pages:,} pages, {sharing}, {policy}"
                + (", with the scanner" if scanner else "")
            )
            turns = scanned if scanner else quiet
            tallies = replay(
                turns,
                pages=pages,
                sharing=sharing,
                policy=policy,
                quotas=quotas_of(turns, plan.scanner_share),
            )
            yield Replayed(pages, sharing, policy, scanner, seed, tallies)


def replay(
    turns: Sequence[Turn],
    *,
    pages: int,
    sharing: CacheSharing,
    policy: EvictionPolicy,
    quotas: Mapping[str, Quota],
) -> dict[str, Tally]:
    """Send ``turns`` through a cache of ``pages`` pages.

    Args:
        quotas: of every tenant that occurs.

    Raises:
        NoPages: a tenant's share is no page.
    """
    tallies = {tenant: Tally() for tenant in sorted(quotas)}
    namespaces = {
        tenant: Namespace(tenant=tenant, cache_salt=None, extra_key=None, adapter=None)
        for tenant in tallies
    }
    now = 0
    pool = PagePool(pages)
    try:
        cache = CacheManager(
            pool,
            PAGE_TOKENS,
            sharing=sharing,
            policy=policy,
            quotas=quotas,
            clock=lambda: now,
        )
    except ValueError:
        raise NoPages(
            f"{pages:,}, {sharing}, leave one of {len(quotas):,} tenants without a page; "
            "give more pages, or fewer --tenants"
        ) from None
    for turn in turns:
        now = turn.at
        tally = tallies[turn.tenant]
        fits = min(turn.pages, cache.forest.accounts.of(turn.tenant).share.capacity)
        tally.requests += 1
        tally.asked += turn.pages
        if fits < turn.pages:
            tally.cut_requests += 1
            tally.cut += turn.pages - fits
        tokens = fits * PAGE_TOKENS
        table = cache.open(namespaces[turn.tenant], turn.prompt[: (tokens + 1) * TOKEN_BYTES])
        tally.found += table.cached_tokens // PAGE_TOKENS
        if not cache.grow(table, tokens):
            raise RuntimeError(f"{turn.tenant} got no {fits} pages, and nothing else runs")
        whole = turn.prompt[: tokens * TOKEN_BYTES]
        cache.commit(table, whole)
        cache.close(table, whole)
    if not cache.balanced():
        raise RuntimeError("the cache lost count of its pages")
    for account in cache.forest.accounts:
        if account.tenant in tallies:
            tallies[account.tenant].evicted_by = dict(sorted(account.evicted_by.items()))
    return tallies


def quotas_of(turns: Sequence[Turn], scanner_share: float) -> dict[str, Quota]:
    """The same weight for every tenant of ``turns`` but the scanner, which gets its share."""
    quotas = {turn.tenant: Quota() for turn in turns}
    if SCANNER in quotas:
        others = len(quotas) - 1
        quotas[SCANNER] = Quota(weight=others * scanner_share / (1 - scanner_share))
    return quotas


def turns_of(trace: Trace, plan: Plan, seed: int) -> list[Turn]:
    """The trace's requests in order of time, each as the request of a tenant."""
    roots = sorted({request.root for request in trace.requests})
    tenants = _deal_out(roots, plan.tenants, seed)
    begins = random.Random(seed)
    starts = {root: begins.uniform(0, plan.spread) if trace.own_clocks else 0.0 for root in roots}

    def at(request: TraceRequest) -> int:
        return round((starts[request.root] + request.at) * _NANOSECONDS)

    return [
        _turn(at(request), tenants[request.root], request.blocks)
        for request in sorted(trace.requests, key=at)
    ]


def with_scanner(turns: Sequence[Turn], scans: int) -> list[Turn]:
    """Put the scanner's requests in: ``scans`` behind each one of the middle half.

    Its prompts are as long as the average one, and none of their blocks comes twice.
    """
    pages = max(1, round(sum(turn.pages for turn in turns) / max(1, len(turns))))
    first, last = len(turns) // 4, len(turns) - len(turns) // 4
    fresh = np.arange((last - first) * scans * pages, dtype=np.uint64).reshape(-1, pages)
    prompts = iter(fresh)  # in a namespace of their own, where no other prompt has these ids
    both = []
    for number, turn in enumerate(turns):
        both.append(turn)
        if first <= number < last:
            for _ in range(scans):
                both.append(_turn(turn.at, SCANNER, next(prompts)))
    return both


def _deal_out(roots: Sequence[str], tenants: int, seed: int) -> dict[str, str]:
    """Roots to tenants, the same number to each, in the order of a hash."""
    if not tenants:
        return {root: f"root-{number}" for number, root in enumerate(roots)}
    key = str(seed).encode()
    hashed = sorted(roots, key=lambda root: hashlib.blake2b(root.encode(), key=key).digest())
    width = len(str(tenants))
    names = [f"t{number:0{width}}" for number in range(1, tenants + 1)]
    return dict(zip(hashed, cycle(names), strict=False))


def _turn(at: int, tenant: str, blocks: BlockIds) -> Turn:
    return Turn(at, tenant, page_tokens(blocks) + _LAST_TOKEN, len(blocks))
