"""The cache as the settings and the file of tenants want it."""

from __future__ import annotations

from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.cache.records import Records
from ktserve.config import Settings
from ktserve.tenancy.shares import Share
from ktserve.tenancy.tenants import Roster


def build_cache(settings: Settings, pages: int, roster: Roster) -> CacheManager:
    """The cache over a pool of ``pages`` pages, divided among the tenants of ``roster``.

    Raises:
        ValueError: the pool cannot be divided as their quotas say.
    """
    return CacheManager(
        PagePool(pages),
        settings.page_size,
        enabled=not settings.disable_radix_cache,
        sharing=settings.cache_sharing,
        policy=settings.radix_eviction_policy,
        quotas=roster.quotas,
        max_namespaces=settings.max_namespaces,
        max_nodes=settings.max_nodes,
        pin_budget=settings.pin_budget,
        reserve_public=bool(roster.public) and not settings.disable_radix_cache,
        records=Records(),
    )


def shares_in_tokens(cache: CacheManager, roster: Roster) -> dict[str, Share]:
    """What each tenant keeps, may hold, and can get for one sequence, in tokens."""
    size = cache.page_size
    shares = {tenant.name: cache.accounts.of(tenant.name).share for tenant, _ in roster.entries}
    return {
        name: Share(share.floor * size, share.cap * size, share.capacity * size)
        for name, share in shares.items()
    }
