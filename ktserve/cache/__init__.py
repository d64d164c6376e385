"""The prefix cache: a radix tree for each namespace over one pool of pages."""

from ktserve.cache.forest import RadixForest
from ktserve.cache.kept import CacheError, Pin, PublicPrefix
from ktserve.cache.manager import CacheManager
from ktserve.cache.node import Lease
from ktserve.cache.pool import PagePool
from ktserve.cache.reasons import Reason
from ktserve.cache.records import Record, Records
from ktserve.cache.tables import BlockTable

__all__ = [
    "BlockTable",
    "CacheError",
    "CacheManager",
    "Lease",
    "PagePool",
    "Pin",
    "PublicPrefix",
    "RadixForest",
    "Reason",
    "Record",
    "Records",
]
