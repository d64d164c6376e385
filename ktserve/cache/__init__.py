"""The prefix cache: a radix tree for each namespace over one pool of pages."""

from ktserve.cache.forest import Lease, RadixForest
from ktserve.cache.manager import BlockTable, CacheManager
from ktserve.cache.pool import PagePool

__all__ = ["BlockTable", "CacheManager", "Lease", "PagePool", "RadixForest"]
