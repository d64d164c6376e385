"""Prefixes that an operator made public: held once, read by the tenants that were named.

Each lives in a namespace of its own that no request can have: its tenant's name is not allowed for
a tenant. A reader's own tokens behind the prefix are in the reader's own tree, on a root apart
(a *graft*), so that every page has one owner and what a reader adds is seen by nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktserve.cache.accounts import PUBLIC_TENANT
from ktserve.cache.node import Lease
from ktserve.tenancy.namespace import Namespace


@dataclass
class PublicPrefix:
    """One of them.

    Attributes:
        id: of this registration; a later one of the same name gets another, so that nothing which
            was computed behind the old text is found behind the new.
        tokens: packed, whole pages.
        pages: their number.
        lease: that keeps them; None until they were computed.
    """

    id: int
    name: str
    readers: frozenset[str]
    tokens: bytes
    pages: int
    lease: Lease | None = None

    @property
    def namespace(self) -> Namespace:
        """Where its tokens are kept."""
        return public_namespace(self.name, self.id)


def public_namespace(name: str, registration: int) -> Namespace:
    """The namespace of the public prefix ``name`` in one of its registrations."""
    return Namespace(
        tenant=PUBLIC_TENANT, cache_salt=str(registration), extra_key=name, adapter=None
    )
