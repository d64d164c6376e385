"""Tenants: who may use the server, under which keys, within which limits.

A tenant follows from the API key alone. Keys are kept as SHA-256, whatever the source: a file of
tenants, the single ``--api-key``, or none at all.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ktserve.tenancy.tenant import Limits, PublicPrefix, Quota, Tenant
from ktserve.tenancy.tenants_file import read_tenants_file

if TYPE_CHECKING:
    from ktserve.config import Settings

__all__ = [
    "DEFAULT_TENANT",
    "AuthenticationError",
    "Limits",
    "PublicPrefix",
    "Quota",
    "Roster",
    "Tenant",
    "Tenants",
    "hash_key",
    "load_roster",
]

DEFAULT_TENANT = "default"
"""The name of the one tenant of a server without a file of tenants."""


class AuthenticationError(Exception):
    """The request carries no key, or none that is known. The message never tells a key apart."""


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """Every tenant of a server with the digests of its keys, as the processes hand it on.

    The supervisor reads it once; what an operator changes while the server runs is in it, too.

    Attributes:
        entries: each tenant, once, with the SHA-256 digests of its keys.
        open_tenant: with it every request is that tenant's, and no key is asked for.
        public: the prefixes that are public among them.
    """

    entries: tuple[tuple[Tenant, tuple[bytes, ...]], ...]
    open_tenant: Tenant | None
    public: tuple[PublicPrefix, ...] = ()

    @property
    def quotas(self) -> dict[str, Quota]:
        """Each tenant's part of the page pool, by name."""
        return {tenant.name: tenant.quota for tenant, _ in self.entries}

    def __repr__(self) -> str:
        return f"<Roster: {len(self.entries)} tenants>"


class Tenants:
    """The way from an API key to the tenants of a roster.

    Iterates over the tenants in the order of their declaration; `len` counts them.

    Attributes:
        public: the prefixes that are public among them.
    """

    def __init__(self, roster: Roster) -> None:
        self._tenants = tuple(tenant for tenant, _ in roster.entries)
        self._keys = tuple(
            (digest, tenant) for tenant, digests in roster.entries for digest in digests
        )
        self._open = roster.open_tenant
        self.public = roster.public

    @property
    def needs_key(self) -> bool:
        """Whether a request without a key is refused."""
        return self._open is None

    def authenticate(self, api_key: str | None) -> Tenant:
        """The tenant whose key ``api_key`` is.

        The digest of the key is compared with every known one in constant time, and the search does
        not end at a match, so that the time tells nothing about which key came close or where a
        tenant stands. One comparison is about a quarter of a microsecond.

        Args:
            api_key: as it was presented, or None where the request has none.

        Raises:
            AuthenticationError: a key is needed and this is none.
        """
        if self._open is not None:
            return self._open
        if api_key is None:
            raise AuthenticationError(
                "an API key is needed; send it as 'Authorization: Bearer KEY'"
            )
        presented = hash_key(api_key)
        found: Tenant | None = None
        for digest, tenant in self._keys:
            if hmac.compare_digest(digest, presented):
                found = tenant
        if found is None:
            raise AuthenticationError("the API key is not valid; check the key, or ask for one")
        return found

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants)

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"<Tenants: {len(self._tenants)} tenants, {len(self._keys)} keys>"


def hash_key(api_key: str) -> bytes:
    """The SHA-256 digest under which a key is kept: 32 bytes.

    A key is 256 random bits, so that a plain hash is enough: there is nothing to guess. Text that
    is no valid Unicode has a digest too, and matches no key.
    """
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).digest()


def load_roster(settings: Settings) -> Roster:
    """The tenants that ``settings`` speak of.

    With ``tenants`` they come from that file. With ``api_key`` there is one tenant, ``default``,
    and its one key. With neither there is that tenant, and no key is asked for.

    Raises:
        TenantsFileError: the file cannot be read or breaks a rule.
    """
    if settings.tenants is not None:
        file = read_tenants_file(Path(settings.tenants), need_key=True)
        entries = tuple((tenant, tuple(digests)) for tenant, digests in file.entries)
        return Roster(entries=entries, open_tenant=None, public=file.public)
    default = Tenant(DEFAULT_TENANT)
    if settings.api_key is not None:
        return Roster(entries=((default, (hash_key(settings.api_key),)),), open_tenant=None)
    return Roster(entries=((default, ()),), open_tenant=default)
