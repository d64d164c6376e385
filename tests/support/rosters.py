"""Tenants with keys, for tests."""

from __future__ import annotations

from ktserve.tenancy.tenants import Roster, Tenant, Tenants, hash_key


def with_keys(*entries: tuple[Tenant, list[str]]) -> Tenants:
    """Each tenant with its keys."""
    hashed = tuple((tenant, tuple(hash_key(key) for key in keys)) for tenant, keys in entries)
    return Tenants(Roster(entries=hashed, open_tenant=None))
