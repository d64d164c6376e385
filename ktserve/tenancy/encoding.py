"""The one byte encoding of a namespace, for the places where a tuple cannot go.

Layout: the version tag, then for each field in order (tenant, cache_salt, extra_key, adapter) a
presence byte, and where it is 1 a 4-byte big-endian length and that many bytes. Text is UTF-8; the
adapter's generation is 8 bytes big-endian. Absent, empty and any string differ, no two namespaces
share an encoding, and `decode` gives the namespace back. Test vectors: ``docs/isolation.md``.

Equality of namespaces is never decided by this encoding or by a digest of it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

from ktserve.tenancy.namespace import Namespace

VERSION_TAG = b"ktserve-ns-1\x00"


def encode(namespace: Namespace) -> bytes:
    """The canonical bytes of ``namespace``."""
    parts = [VERSION_TAG]
    for text in (namespace.tenant, namespace.cache_salt, namespace.extra_key):
        parts.append(_frame(None if text is None else text.encode()))
    adapter = namespace.adapter
    parts.append(_frame(None if adapter is None else adapter.to_bytes(8, "big")))
    return b"".join(parts)


def decode(data: bytes) -> Namespace:
    """The namespace whose encoding is exactly ``data``.

    Raises:
        ValueError: ``data`` is no such encoding.
    """
    if not data.startswith(VERSION_TAG):
        raise ValueError("not a namespace encoding of a known version")
    fields: list[bytes | None] = []
    at = len(VERSION_TAG)
    for _ in range(4):
        presence = data[at : at + 1]
        at += 1
        if presence == b"\x00":
            fields.append(None)
            continue
        size = data[at : at + 4]
        if presence != b"\x01" or len(size) != 4:
            raise ValueError("malformed field in a namespace encoding")
        at += 4
        value = data[at : at + int.from_bytes(size, "big")]
        if len(value) != int.from_bytes(size, "big"):
            raise ValueError("a namespace encoding ends inside a field")
        at += len(value)
        fields.append(value)
    if at != len(data):
        raise ValueError("bytes after the end of a namespace encoding")
    tenant, cache_salt, extra_key, adapter = fields
    if tenant is None or (adapter is not None and len(adapter) != 8):
        raise ValueError("malformed field in a namespace encoding")
    return Namespace(
        tenant=tenant.decode(),
        cache_salt=None if cache_salt is None else cache_salt.decode(),
        extra_key=None if extra_key is None else extra_key.decode(),
        adapter=None if adapter is None else int.from_bytes(adapter, "big"),
    )


def pseudonym(namespace: Namespace, key: bytes) -> str:
    """A name for ``namespace`` that tells nothing about it without ``key``: ``ns-`` and 16 letters.

    For logs, metrics and views. 80 bits of HMAC-SHA256: enough to tell namespaces apart for a
    person, never used to decide whether two are one.

    Raises:
        ValueError: ``key`` is empty, which would let anybody compute the pseudonym of a guess.
    """
    if not key:
        raise ValueError("pseudonym needs a key; draw one at random for each start")
    digest = hmac.new(key, encode(namespace), hashlib.sha256).digest()
    return "ns-" + base64.b32encode(digest[:10]).decode().lower()


def _frame(value: bytes | None) -> bytes:
    return b"\x00" if value is None else b"\x01" + len(value).to_bytes(4, "big") + value
