"""Which namespaces exist, and which of them are one."""

from __future__ import annotations

import io
import itertools
import traceback

import msgspec
import pytest
from rich.console import Console

from ktserve.tenancy.namespace import MAX_ADAPTER, MAX_FIELD_BYTES, InvalidNamespace, Namespace

TEXT_FIELDS = ("tenant", "cache_salt", "extra_key")

REFUSED = {
    "empty": ("", "must not be empty"),
    "number": (7, "must be a string, not a number"),
    "boolean": (True, "must be a string, not a boolean"),
    "list": (["a"], "must be a string, not a list"),
    "object": ({"a": 1}, "must be a string, not an object"),
    "bytes": (b"a", "must be a string"),
    "1025 letters": ("a" * (MAX_FIELD_BYTES + 1), "1024 bytes"),
    "1026 bytes in 513 letters": ("é" * 513, "has 1026 bytes; the limit is 1024"),
    "1028 bytes in 257 emoji": ("🔑" * 257, "has 1028 bytes"),
    "NUL": ("a\x00b", "U+0000"),
    "newline": ("a\n", "U+000A"),
    "tab": ("\ta", "U+0009"),
    "escape": ("\x1b[31m", "U+001B"),
    "unit separator": ("a\x1fb", "U+001F"),
    "DEL": ("\x7f", "U+007F"),
    "C1": ("a\x80", "U+0080"),
    "CSI": ("\x9b31m", "U+009B"),
    "lone high surrogate": ("\ud83d", "lone surrogate"),
    "lone low surrogate": ("a\udd11", "lone surrogate"),
}

# Each differs from each other one: nothing is normalised, trimmed or folded.
DIFFERENT = (
    "salt", "Salt", "SALT", " salt", "salt ", "sa lt", "sa  lt", "sa\u00a0lt", "salt\u200b",
    "caf\u00e9", "cafe\u0301", "\u212b", "\u00c5", "A\u030a", "ﬁ", "fi", "straße", "strasse",
    "\u202etlas", "\u2066salt\u2069", "\u2028", "🔑", "🔑\ufe0f", "👩‍💻", "None", "null", "0", "[]",
)  # fmt: skip


def namespace(
    tenant: str = "acme",
    cache_salt: str | None = None,
    extra_key: str | None = None,
    adapter: int | None = None,
) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=cache_salt, extra_key=extra_key, adapter=adapter)


def decoded(value: object) -> Namespace:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Namespace)


@pytest.mark.parametrize("field", TEXT_FIELDS)
@pytest.mark.parametrize(("value", "problem"), REFUSED.values(), ids=REFUSED)
def test_bad_text_is_refused_with_the_field_and_the_rule(
    field: str, value: object, problem: str
) -> None:
    with pytest.raises(InvalidNamespace, match=field) as caught:
        namespace(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert problem in str(caught.value)


@pytest.mark.parametrize("field", TEXT_FIELDS)
@pytest.mark.parametrize("value", ["a", "a" * 1024, "é" * 512, "🔑" * 256, *DIFFERENT])
def test_good_text_is_kept_as_it_is(field: str, value: str) -> None:
    assert getattr(namespace(**{field: value}), field) == value  # type: ignore[arg-type]


def test_every_control_character_is_refused_and_the_next_is_not() -> None:
    for code in (*range(0x20), *range(0x7F, 0xA0)):
        with pytest.raises(InvalidNamespace, match=f"U\\+{code:04X}"):
            namespace(cache_salt=chr(code))
    for code in (0x20, 0x7E, 0xA0):
        namespace(cache_salt=chr(code))


@pytest.mark.parametrize("adapter", [-1, MAX_ADAPTER + 1, True, 1.0, "1"])
def test_a_bad_adapter_is_refused(adapter: object) -> None:
    with pytest.raises(InvalidNamespace, match="adapter must be a load generation"):
        namespace(adapter=adapter)  # type: ignore[arg-type]


@pytest.mark.parametrize("adapter", [0, 1, MAX_ADAPTER])
def test_an_adapter_may_be_any_64_bit_generation(adapter: int) -> None:
    assert decoded(namespace(adapter=adapter)).adapter == adapter


@pytest.mark.parametrize("missing", ["tenant", "cache_salt", "extra_key", "adapter"])
def test_no_field_has_a_default(missing: str) -> None:
    fields = {"tenant": "acme", "cache_salt": None, "extra_key": None, "adapter": None}
    Namespace(**fields)  # type: ignore[arg-type]
    del fields[missing]
    with pytest.raises(TypeError, match=missing):
        Namespace(**fields)  # type: ignore[arg-type]


def test_no_field_can_be_changed() -> None:
    made = namespace()
    with pytest.raises(AttributeError):
        made.tenant = "other"  # type: ignore[misc]


def test_equal_namespaces_are_one_key_and_different_ones_are_not() -> None:
    values = [None, "a", "b", "ab", "bc", "c"]
    all_of_them = [
        namespace(tenant, salt, extra, adapter)
        for tenant in ("a", "ab")
        for salt, extra, adapter in itertools.product(values, values, (None, 0, 1))
    ]
    trees = {each: number for number, each in enumerate(all_of_them)}
    assert len(trees) == len(all_of_them)
    for number, each in enumerate(all_of_them):
        again = namespace(each.tenant, each.cache_salt, each.extra_key, each.adapter)
        assert trees[again] == number


def test_look_alikes_are_different() -> None:
    assert len({namespace(cache_salt=text) for text in DIFFERENT}) == len(DIFFERENT)


def test_decoding_gives_the_same_namespace() -> None:
    made = namespace("acme", "salt", "extra", 3)
    assert decoded(made) == made


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (["", None, None, None], "tenant must not be empty"),
        (["acme", "", None, None], "cache_salt must not be empty"),
        (["acme", None, "a\x00", None], "U\\+0000"),
        (["acme", "é" * 513, None, None], "1026 bytes"),
        ([None, None, None, None], "Expected `str`"),
        (["acme", 1, None, None], "Expected `str"),
        (["acme", None, None, True], "Expected `int"),
        (["acme", None, None], "at least length 4|length 4"),
        (["acme", None, None, None, "more"], "length"),
        ({"tenant": "acme"}, "Expected `array`"),
    ],
)
def test_decoding_runs_the_checks_too(value: object, problem: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=problem):
        decoded(value)


def test_replacing_a_field_runs_the_checks_too() -> None:
    made = namespace()
    assert msgspec.structs.replace(made, cache_salt="s") == namespace(cache_salt="s")
    with pytest.raises(InvalidNamespace):
        msgspec.structs.replace(made, cache_salt="")


def test_no_representation_shows_a_value() -> None:
    made = namespace("secret-tenant", "secret-salt", "secret-key", 77)
    console = Console(file=io.StringIO(), width=200)
    console.print(made)
    holder = msgspec.defstruct("Holder", [("namespace", Namespace)])(made)
    shown = [repr(made), str(made), f"{made}", repr([made]), repr(holder)]
    shown.append(console.file.getvalue())  # type: ignore[attr-defined]
    for text in shown:
        assert "Namespace" in text
        assert "secret" not in text
        assert "77" not in text


def test_no_error_shows_a_value() -> None:
    for value in ("secret-salt\x00", "secret-salt" * 200, "secret-salt\ud800"):
        with pytest.raises(InvalidNamespace) as caught:
            namespace(cache_salt=value)
        shown = "".join(traceback.format_exception_only(caught.value))
        assert "cache_salt" in shown
        assert "secret" not in shown
