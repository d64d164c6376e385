"""The namespace: the contract that decides which requests may share cached keys and values.

A namespace is compared field by field, as a value. No digest, join or normal form ever stands in
for it, so two namespaces are one only if the same tenant, salt, extra key and adapter are.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import msgspec

MAX_FIELD_BYTES = 1024
"""The longest text field of a namespace, in UTF-8 bytes."""


class InvalidNamespace(ValueError):
    """A field of a namespace breaks a rule; the message names the field, the rule and the remedy.

    Attributes:
        field: the field's name as the client sends it, for example ``cache_salt``.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


MAX_ADAPTER = 2**64 - 1
"""The highest load generation: what 8 bytes hold, in the encoding and in MessagePack."""


class Namespace(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """The identity under which a request's prefix is cached: one radix tree for each.

    There is no default for any field: a namespace that somebody forgot to pass on is a type error.
    Every way in, decoding included, goes through this constructor and its checks. A decoded array
    with a field too many is refused as well: ignoring it could merge two namespaces.

    The representation hides the values, since a salt is a bearer secret and a representation ends
    up in logs and tracebacks. `ktserve.tenancy.encoding.pseudonym` names a namespace to people.

    Attributes:
        tenant: the tenant's name, from authentication alone.
        cache_salt: the client's own subdivision of its tenant; None is "not sent".
        extra_key: a second, independent subdivision; None is "not sent".
        adapter: the load generation of the LoRA adapter; None is the base model.

    Raises:
        InvalidNamespace: a field has the wrong type, is empty, too long, or holds control
            characters or lone surrogates.
    """

    tenant: str
    cache_salt: str | None
    extra_key: str | None
    adapter: int | None

    def __post_init__(self) -> None:
        check_text("tenant", self.tenant)
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt)
        if self.extra_key is not None:
            check_text("extra_key", self.extra_key)
        adapter = self.adapter
        if adapter is not None and not (type(adapter) is int and 0 <= adapter <= MAX_ADAPTER):
            raise InvalidNamespace(
                "adapter", f"must be a load generation: a whole number from 0 to {MAX_ADAPTER}"
            )

    def __repr__(self) -> str:
        return "Namespace(hidden)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


def check_text(field: str, value: object) -> None:
    """Raise InvalidNamespace unless ``value`` may stand in the text field named ``field``.

    The text is taken as it is: no trimming, case folding or Unicode normal form, because each of
    those would make two different values equal.
    """
    if not isinstance(value, str):
        raise InvalidNamespace(field, f"must be a string, not {_json_type(value)}")
    if not value:
        raise InvalidNamespace(field, "must not be empty; leave it out to send none")
    if len(value) > MAX_FIELD_BYTES:
        raise InvalidNamespace(field, f"is longer than {MAX_FIELD_BYTES} bytes; send a shorter one")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidNamespace(
            field, "holds a lone surrogate, which is not text; send valid Unicode"
        ) from None
    if size > MAX_FIELD_BYTES:
        raise InvalidNamespace(
            field, f"has {size} bytes; the limit is {MAX_FIELD_BYTES} bytes of UTF-8"
        )
    for character in value:
        if unicodedata.category(character) == "Cc":
            raise InvalidNamespace(
                field, f"holds the control character U+{ord(character):04X}; remove it"
            )


def _json_type(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)
