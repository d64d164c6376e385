"""Dividing a pool: whatever the quotas, nobody is promised what others were promised."""

from __future__ import annotations

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from ktserve.tenancy.shares import divide
from ktserve.tenancy.tenant import Quota

parts = st.floats(0.001, 1)


@st.composite
def quotas(draw: st.DrawFn) -> dict[str, Quota]:
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True))
    floors = draw(st.lists(st.none() | parts, min_size=len(names), max_size=len(names)))
    scale = max(1.0, sum(floor or 0 for floor in floors))
    made = {}
    for name, floor in zip(names, floors, strict=True):
        cap = draw(st.none() | parts)
        own = None if floor is None else floor / scale
        made[name] = Quota(
            weight=draw(st.floats(0.01, 100)),
            cache_floor=own,
            cache_cap=cap if cap is None or own is None else max(cap, own),
        )
    return made


@given(
    quotas=quotas(),
    pages=st.integers(1000, 100_000),
    sharing=st.sampled_from(["shared", "floors", "partitioned"]),
)
def test_floors_fit_the_pool_and_caps_hold_them(quotas, pages, sharing):
    try:
        shares = divide(sharing, pages, quotas)
    except ValueError:
        reject()  # a part of no page, see below
    assert list(shares) == list(quotas)
    assert sum(share.floor for share in shares.values()) <= pages
    for name, share in shares.items():
        others = sum(one.floor for other, one in shares.items() if other != name)
        assert 0 <= share.floor <= share.cap <= pages
        assert share.cap > 0
        assert share.capacity == min(share.cap, pages - others)
        if (cap := quotas[name].cache_cap) is not None:
            assert share.cap <= cap * pages
    if sharing == "partitioned":
        assert all(share.floor == share.cap == share.capacity for share in shares.values())
    assert divide(sharing, pages, dict(reversed(quotas.items()))) == shares


@pytest.mark.parametrize(
    ("sharing", "floors"), [("shared", (0, 0)), ("floors", (150, 50)), ("partitioned", (300, 100))]
)
def test_weights_divide_the_pool(sharing, floors):
    shares = divide(sharing, 400, {"a": Quota(3), "b": Quota(1)})
    assert (shares["a"].floor, shares["b"].floor) == floors
    assert shares["a"].cap == (300 if sharing == "partitioned" else 400)
    assert shares["a"].capacity == {"shared": 400, "floors": 350, "partitioned": 300}[sharing]


def test_the_order_of_the_file_changes_nothing():
    # Added up from the left, these weights differ in the last bit from their sum from the right.
    quotas = {"a": Quota(2.0), "b": Quota(1.2), "c": Quota(1.6)}
    shares = divide("partitioned", 60, quotas)
    assert divide("partitioned", 60, dict(reversed(quotas.items()))) == shares


def test_what_is_set_is_kept_and_the_others_divide_the_rest():
    quotas = {"a": Quota(cache_floor=0.5), "b": Quota(1), "c": Quota(3, cache_cap=0.1)}
    shares = divide("floors", 800, quotas)
    assert [(share.floor, share.cap) for share in shares.values()] == [
        (400, 800),
        (50, 800),
        (80, 80),
    ]
    assert shares["b"].capacity == 800 - 480


def test_one_tenant_has_everything_in_every_mode():
    for sharing in ("shared", "floors", "partitioned"):
        assert divide(sharing, 77, {"a": Quota()})["a"].capacity == 77


@pytest.mark.parametrize(
    ("sharing", "quotas", "problem"),
    [
        ("partitioned", {"a": Quota(1e6), "b": Quota(1)}, "tenant b gets none of the 100 pages"),
        ("floors", {"a": Quota(cache_floor=0.7), "b": Quota(cache_floor=0.7)}, "add up to 140"),
        ("shared", {"a": Quota(cache_cap=0.001)}, "tenant a gets none"),
        ("floors", {"a": Quota(cache_floor=1.0), "b": Quota()}, "tenant b can never get a page"),
    ],
)
def test_what_cannot_be_had_is_named(sharing, quotas, problem):
    with pytest.raises(ValueError, match=problem):
        divide(sharing, 100, quotas)
