"""The byte encoding of namespaces: what is published, and that no two share one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ktserve.tenancy.encoding import VERSION_TAG, decode, encode, pseudonym
from ktserve.tenancy.namespace import MAX_ADAPTER, InvalidNamespace, Namespace

DOCUMENT = Path(__file__).parents[2] / "docs" / "isolation.md"
KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))


def namespace(
    tenant: str = "a",
    cache_salt: str | None = None,
    extra_key: str | None = None,
    adapter: int | None = None,
) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=cache_salt, extra_key=extra_key, adapter=adapter)


def published() -> list[tuple[Namespace, str, str]]:
    """The vectors of the document: the namespace, its encoding, its pseudonym under `KEY`."""
    row = re.compile(r"^\| `(\[.*\])` \| `([0-9a-f]+)` \| `(ns-[a-z2-7]{16})` \|$", re.MULTILINE)
    found = row.findall(DOCUMENT.read_text(encoding="utf-8"))
    return [(namespace(*json.loads(fields)), hexes, name) for fields, hexes, name in found]


texts = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=40)
namespaces = st.builds(
    Namespace,
    tenant=texts,
    cache_salt=st.none() | texts,
    extra_key=st.none() | texts,
    adapter=st.none() | st.integers(0, MAX_ADAPTER),
)
# Few letters, so that boundaries between fields fall in every way.
close_texts = st.text("ab", min_size=1, max_size=3)
close_namespaces = st.builds(
    Namespace,
    tenant=close_texts,
    cache_salt=st.none() | close_texts,
    extra_key=st.none() | close_texts,
    adapter=st.none() | st.integers(0, 2),
)


def test_the_document_publishes_every_kind_of_namespace() -> None:
    vectors = published()
    assert len(vectors) >= 10
    for present in (
        [n.cache_salt for n, _, _ in vectors],
        [n.extra_key for n, _, _ in vectors],
        [n.adapter for n, _, _ in vectors],
    ):
        assert None in present
        assert len(set(present)) > 2
    assert len({n for n, _, _ in vectors}) == len({h for _, h, _ in vectors}) == len(vectors)


@pytest.mark.parametrize("index", range(len(published())))
def test_published_vectors_hold(index: int) -> None:
    made, hexes, name = published()[index]
    assert encode(made).hex() == hexes
    assert decode(bytes.fromhex(hexes)) == made
    assert pseudonym(made, KEY) == name


@given(namespaces)
def test_decoding_undoes_encoding(made: Namespace) -> None:
    assert decode(encode(made)) == made


@given(close_namespaces, close_namespaces)
def test_two_namespaces_never_share_an_encoding(one: Namespace, other: Namespace) -> None:
    assert (encode(one) == encode(other)) == (one == other)


def test_fields_do_not_run_into_each_other() -> None:
    made = [
        namespace("a", "bc"),
        namespace("ab", "c"),
        namespace("abc"),
        namespace("a", None, "bc"),
        namespace("a", "b", "c"),
        namespace("a", None, None, 0x6263),
        namespace("a", "\u6263"),
        namespace("a", "25187"),
    ]
    assert len({encode(each) for each in made}) == len(made)
    # The same field, the same value: the same bytes.
    assert encode(namespace("a", "bc")) == encode(made[0])


@given(namespaces, st.data())
def test_a_cut_encoding_is_refused(made: Namespace, data: st.DataObject) -> None:
    whole = encode(made)
    with pytest.raises(ValueError, match="encoding"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(namespaces, st.binary(min_size=1, max_size=20))
def test_a_longer_encoding_is_refused(made: Namespace, more: bytes) -> None:
    with pytest.raises(ValueError, match="after the end"):
        decode(encode(made) + more)


@given(close_namespaces, st.data())
def test_what_decodes_is_canonical(made: Namespace, data: st.DataObject) -> None:
    damaged = bytearray(encode(made))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(damaged))
    except ValueError:
        return
    assert encode(found) == damaged


def frame(value: bytes | None) -> bytes:
    return b"\x00" if value is None else b"\x01" + len(value).to_bytes(4, "big") + value


def encoding(*fields: bytes | None, tag: bytes = VERSION_TAG) -> bytes:
    return tag + b"".join(frame(field) for field in fields)


def test_the_fields_are_framed_as_documented() -> None:
    assert encode(namespace("a", "b")) == encoding(b"a", b"b", None, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encoding(b"a", None, None, None, tag=b"ktserve-ns-2\x00"),
        encoding(None, None, None, None),
        encoding(b"a", None, None),
        encoding(b"a", None, None, b"\x01"),
        encoding(b"a", None, None, b"\x00" * 9),
        VERSION_TAG + b"\x02" + encoding(b"a", None, None, None)[len(VERSION_TAG) + 1 :],
        VERSION_TAG + b"\x01\xff\xff\xff\xff" + b"a",
        encoding(b"\xff", None, None, None),
        encoding(b"a", b"\xed\xa0\x80", None, None),
        encoding(b"a", b"\xc0\xaf", None, None),
    ],
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    assert decode(encoding(b"a", None, None, None)) == namespace("a")
    with pytest.raises(ValueError, match=r"encoding|decode"):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        encoding(b"", None, None, None),
        encoding(b"a", b"", None, None),
        encoding(b"a", None, b"x" * 1025, None),
        encoding(b"a", b"\x00", None, None),
    ],
)
def test_decoding_runs_the_namespaces_own_checks(data: bytes) -> None:
    with pytest.raises(InvalidNamespace):
        decode(data)


@given(namespaces, namespaces)
def test_a_pseudonym_depends_on_the_namespace_and_the_key(
    made: Namespace, other: Namespace
) -> None:
    assume(made != other)
    assert pseudonym(made, KEY) == pseudonym(decode(encode(made)), KEY)
    assert pseudonym(made, KEY) != pseudonym(other, KEY)
    assert pseudonym(made, KEY) != pseudonym(made, OTHER_KEY)


def test_a_pseudonym_needs_a_key() -> None:
    with pytest.raises(ValueError, match="key"):
        pseudonym(namespace(), b"")
