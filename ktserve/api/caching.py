"""How a request wants to use the prefix cache: its field ``cache``."""

from __future__ import annotations

from collections.abc import Mapping

from ktserve.api import fields
from ktserve.api.errors import invalid
from ktserve.config import Settings
from ktserve.messages import CacheOptions

_WITHIN = "cache."


def read_cache(body: Mapping[str, object], settings: Settings) -> CacheOptions:
    """What ``cache`` asks for; what it leaves out is as without it.

    Raises:
        ApiError: 400, naming the member of ``cache``; also for a priority that nothing looks at.
    """
    given = fields.CACHE.of(body)
    if given is None:
        return CacheOptions()
    fields.CACHE_FIELDS.check(given, _WITHIN)
    priority = fields.PRIORITY.of(given, _WITHIN) or 0
    policy = settings.radix_eviction_policy
    if priority and policy != "priority":
        raise invalid(
            _WITHIN + fields.PRIORITY.name,
            f"has no effect: this server evicts by {policy}; leave it out, or start the server "
            "with --radix-eviction-policy priority",
            code="unsupported_parameter",
        )
    # Absent is true, so that only a false turns something off.
    return CacheOptions(
        insert=fields.INSERT.of(given, _WITHIN) is not False,
        lookup=fields.LOOKUP.of(given, _WITHIN) is not False,
        priority=priority,
    )
