"""What an operator keeps from eviction, within one budget: pins, and public prefixes.

A public prefix is held once and read by the tenants that were named. It lives in a namespace of its
own that no request can have: its tenant's name is not allowed for a tenant. A reader's own tokens
behind the prefix are in the reader's own tree, on a root apart (a *graft*), so that every page has
one owner and what a reader adds is seen by nobody else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from ktserve.cache.accounts import PUBLIC_TENANT
from ktserve.cache.forest import Behind, RadixForest
from ktserve.cache.node import Lease, Tree
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import TOKEN_BYTES


class CacheError(ValueError):
    """An operator's change that cannot be made; the message says why and what to do."""


class Pin(NamedTuple):
    """A prefix that an operator keeps from eviction.

    Attributes:
        pages: that are kept by it.
    """

    id: int
    lease: Lease
    pages: int


@dataclass
class PublicPrefix:
    """A prefix that an operator made public.

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
        return Namespace(
            tenant=PUBLIC_TENANT, cache_salt=str(self.id), extra_key=self.name, adapter=None
        )

    @property
    def behind(self) -> Behind:
        """Where a reader's own tokens begin."""
        return Behind(self.id, self.pages)


class Kept:
    """The pins and the public prefixes of one cache.

    Args:
        budget: pages that they take at most.
        public_allowed: pages are set aside for public prefixes.

    Attributes:
        pins: by id, oldest first.
        public: by name.
    """

    def __init__(self, forest: RadixForest, *, budget: int, public_allowed: bool) -> None:
        self.pins: dict[int, Pin] = {}
        self.public: dict[str, PublicPrefix] = {}
        self._forest = forest
        self._budget = budget
        self._public_allowed = public_allowed
        self._last_id = 0

    def next_id(self) -> int:
        """An id that no pin and no registration had before."""
        self._last_id += 1
        return self._last_id

    def leases(self) -> list[Lease]:
        """The leases by which it is kept."""
        held = [pin.lease for pin in self.pins.values()]
        return held + [one.lease for one in self.public.values() if one.lease is not None]

    def check_budget(self, pages: int, what: str, *, instead: PublicPrefix | None = None) -> None:
        """Raise CacheError unless there is room for ``what`` in the place of ``instead``."""
        taken = sum(pin.pages for pin in self.pins.values())
        taken += sum(public.pages for public in self.public.values() if public is not instead)
        if taken + pages > self._budget:
            size = self._forest.page_size
            raise CacheError(
                f"{what} needs {pages * size} tokens; of the {self._budget * size} that"
                f" --pin-budget allows {taken * size} are taken: raise it, or remove a pin"
            )

    def registration(self, name: str, readers: Collection[str], tokens: bytes) -> PublicPrefix:
        """What is registered under ``name`` if it is equal, otherwise a new prefix to register.

        Raises:
            CacheError: it is shorter than a page, public prefixes are not allowed for, or the
                budget does not allow it.
        """
        if not self._public_allowed:
            raise CacheError(
                f"public prefix {name}: nothing of the pool is kept for public prefixes; start the"
                " server with one in its file of tenants"
            )
        size = self._forest.page_size
        count = len(tokens) // TOKEN_BYTES
        pages = count // size
        if pages == 0:
            raise CacheError(
                f"public prefix {name}: {count} tokens fill no page of {size}; use a longer one"
            )
        whole = tokens[: pages * size * TOKEN_BYTES]
        known = self.public.get(name)
        if known is not None and (known.tokens, known.readers) == (whole, frozenset(readers)):
            return known
        # One page more while it is computed: for the token that a request has to generate.
        what = f"public prefix {name}, with the page by which it is computed,"
        self.check_budget(pages + 1, what, instead=known)
        return PublicPrefix(self.next_id(), name, frozenset(readers), whole, pages)

    def base_for(self, namespace: Namespace, prompt: bytes, limit: int) -> PublicPrefix | None:
        """The longest public prefix of ``prompt`` that its tenant may read, unless the namespace's
        own tree holds more of it.

        Args:
            limit: pages that can be found at most.
        """
        found: PublicPrefix | None = None
        for public in self.public.values():
            if (
                public.lease is not None
                and namespace.tenant in public.readers
                and namespace.adapter is None
                and public.pages <= limit
                and (found is None or public.pages > found.pages)
                and prompt.startswith(public.tokens)
            ):
                found = public
        if found is None:
            return None
        own = self._forest.peek(namespace, prompt, limit)[0]
        behind = self._forest.peek(namespace, prompt, limit, found.behind)[0]
        return None if own > behind else found

    def withdrawn(self, tree: Tree) -> bool:
        """Whether ``tree`` is that of a public prefix which is not registered any more."""
        if tree.namespace.tenant != PUBLIC_TENANT:
            return False
        return all(public.namespace != tree.namespace for public in self.public.values())
