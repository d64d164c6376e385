"""Where a request's namespace is made: the only place of the API that does."""

from __future__ import annotations

from collections.abc import Mapping

from ktserve.api.errors import ApiError, invalid
from ktserve.tenancy.namespace import InvalidNamespace, Namespace
from ktserve.tenancy.tenants import Tenant


def namespaces(
    tenant: Tenant, body: Mapping[str, object], batch: int | None
) -> tuple[Namespace, ...]:
    """The namespace of each prompt of a request.

    Args:
        tenant: whom the API key authenticated; nothing in the body can change it.
        body: ``cache_salt`` and ``extra_key`` are read from it: absent, null, a string for all the
            prompts, or for a batch a list with a string or null for each.
        batch: how many prompts the request's list has; None when its prompt is not a list.

    Raises:
        ApiError: 400, naming the field.
    """
    count = 1 if batch is None else batch
    salts = _each("cache_salt", body.get("cache_salt"), count, listed=batch is not None)
    keys = _each("extra_key", body.get("extra_key"), count, listed=batch is not None)
    try:
        return tuple(
            Namespace(
                tenant=tenant.name,
                cache_salt=salt,  # type: ignore[arg-type]  # Namespace checks it, in one place
                extra_key=key,  # type: ignore[arg-type]
                adapter=None,
            )
            for salt, key in zip(salts, keys, strict=True)
        )
    except InvalidNamespace as error:
        raise ApiError(400, str(error), code="invalid_value", param=error.field) from None


def _each(field: str, value: object, count: int, *, listed: bool) -> list[object]:
    if not isinstance(value, list):
        return [value] * count
    if not listed:
        raise invalid(field, "must be a string here: a list goes with a list of prompts")
    if len(value) != count:
        raise invalid(
            field, f"has {len(value)} entries for {count} prompts; send one for each prompt"
        )
    return list(value)
