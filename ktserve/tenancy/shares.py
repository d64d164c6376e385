"""What the tenants' weights come to: how many pages each keeps, and how many it may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from ktserve.tenancy.tenant import Quota

CacheSharing = Literal["shared", "floors", "partitioned"]


class Share(NamedTuple):
    """One tenant's part of the pool, in pages.

    Attributes:
        floor: what no other tenant takes from it.
        cap: the most that it ever holds.
        capacity: the most that one of its sequences can get, whatever the others keep.
    """

    floor: int
    cap: int
    capacity: int


def divide(sharing: CacheSharing, pages: int, quotas: Mapping[str, Quota]) -> dict[str, Share]:
    """Divide a pool of ``pages`` pages among the tenants of ``quotas``.

    ``shared``: nobody has a floor. ``floors``: half of a tenant's share by weight, or its
    ``cache_floor``. ``partitioned``: the share by weight, or its ``cache_floor``, is floor and cap.
    Where some tenants have a ``cache_floor``, the weights of the others divide what those leave.

    Raises:
        ValueError: the floors are more than the pool, or a tenant could never get a page.
    """
    given = {
        name: int(quota.cache_floor * pages)
        for name, quota in quotas.items()
        if quota.cache_floor is not None and sharing != "shared"
    }
    left = pages - sum(given.values())
    if left < 0:
        raise ValueError(
            f"the tenants' cache_floor add up to {sum(given.values())} of {pages} pages; lower them"
        )
    # fsum: the same in whatever order the file names them.
    weights = math.fsum(quota.weight for name, quota in quotas.items() if name not in given)
    part = {"shared": 0.0, "floors": 0.5, "partitioned": 1.0}[sharing]
    floors: dict[str, int] = {}
    caps: dict[str, int] = {}
    for name, quota in quotas.items():
        cap = pages if quota.cache_cap is None else int(quota.cache_cap * pages)
        floor = given.get(name)
        if floor is None:
            floor = int(left * part * quota.weight / weights)
        floors[name] = min(floor, cap)
        caps[name] = floors[name] if sharing == "partitioned" else cap
        if caps[name] == 0:
            raise ValueError(
                f"tenant {name} gets none of the {pages} pages; raise its weight, cache_floor or"
                " cache_cap, or the pool (--max-total-tokens)"
            )
    total = sum(floors.values())
    shares: dict[str, Share] = {}
    for name in quotas:
        capacity = min(caps[name], pages - total + floors[name])
        if capacity == 0:
            raise ValueError(
                f"tenant {name} can never get a page: the others' floors keep all {pages}; lower"
                " their cache_floor"
            )
        shares[name] = Share(floors[name], caps[name], capacity)
    return shares
