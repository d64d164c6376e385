"""The pages of one running sequence."""

from __future__ import annotations

import numpy as np

from ktserve.cache.accounts import Account
from ktserve.cache.node import Lease
from ktserve.cache.pool import PageIds
from ktserve.cache.reasons import Reason
from ktserve.tenancy.namespace import Namespace


class BlockTable:
    """A leased prefix, then pages of the sequence's own::

        |<--------------------- length ---------------------->|
        |<-------- lease.length --------->|<---- private ---->|
        |<-- base -->|<-- own tree's -->|

    Attributes:
        namespace: whose tree the prefix is leased from and the rest goes to.
        account: its tenant's.
        base: the lease on a public prefix at its beginning, if there is one.
        lease: on the namespace's own tree; its length counts from the first token.
        cached_tokens: tokens whose keys and values came from the cache when it was opened.
        reason: why so many; None for a sequence that was opened before and goes on.
        insert: what it computes is kept for others of its namespace.
        priority: of the request.
        pages: page ids in order, int64; the first `length` of them are valid.
        length: pages held, leased and private.
    """

    __slots__ = (
        "account",
        "base",
        "cached_tokens",
        "insert",
        "lease",
        "length",
        "namespace",
        "pages",
        "priority",
        "reason",
    )

    def __init__(
        self,
        namespace: Namespace,
        account: Account,
        base: Lease | None,
        lease: Lease,
        capacity: int,
        *,
        insert: bool,
        priority: int,
    ) -> None:
        self.namespace = namespace
        self.account = account
        self.base = base
        self.lease = lease
        self.insert = insert
        self.priority = priority
        self.cached_tokens = 0
        self.reason: Reason | None = None
        self.pages: PageIds = np.empty(capacity, dtype=np.int64)
        self.length = lease.length

    @property
    def private(self) -> int:
        """Pages that are this sequence's alone."""
        return self.length - self.lease.length
