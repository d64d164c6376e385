"""Public prefixes: held once, read by the tenants that were named, added to by nobody."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from clocks import TickingClock

from ktserve.cache.accounts import PUBLIC_TENANT
from ktserve.cache.audit import audit
from ktserve.cache.kept import CacheError, PublicPrefix
from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.cache.tables import BlockTable
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.shares import CacheSharing
from ktserve.tenancy.tenant import Quota
from ktserve.tokens import pack, unpack

PROMPT = [1, 2, 3, 4]
MODES: list[CacheSharing] = ["shared", "floors", "partitioned"]
READERS = {"a": Quota(), "b": Quota(), "other": Quota()}


def manager(
    pages: int = 60,
    *,
    budget: float = 0.4,
    page_size: int = 1,
    sharing: CacheSharing = "floors",
    quotas: Mapping[str, Quota] = READERS,
    reserve_public: bool = True,
) -> CacheManager:
    return CacheManager(
        PagePool(pages),
        page_size,
        sharing=sharing,
        quotas=quotas,
        pin_budget=budget,
        reserve_public=reserve_public,
        clock=TickingClock(),
    )


def ns(tenant: str, salt: str | None = None) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=None, adapter=None)


def serve(
    cache: CacheManager,
    namespace: Namespace,
    tokens: list[int],
    beside: Collection[BlockTable] = (),
) -> BlockTable:
    prompt = pack(tokens)
    table = cache.open(namespace, prompt)
    assert cache.grow(table, len(tokens))
    cache.commit(table, prompt)
    audit(cache, [*beside, table])
    cache.close(table, prompt)
    audit(cache, [*beside])
    return table


def publish(
    cache: CacheManager,
    tokens: list[int] = PROMPT,
    readers: Collection[str] = ("a", "b"),
    name: str = "system",
    beside: Collection[BlockTable] = (),
) -> PublicPrefix:
    """Registered, computed and shown to its readers."""
    prefix = cache.publish(name, readers, pack(tokens))
    serve(cache, prefix.namespace, tokens, beside)
    assert cache.hold(prefix)
    audit(cache, [*beside])
    return prefix


def public_pages(cache: CacheManager) -> int:
    return cache.accounts.of(PUBLIC_TENANT).resident


def edges(cache: CacheManager, namespace: Namespace) -> set[tuple[int, ...]]:
    tree = cache.forest.tree(namespace)
    return set() if tree is None else {tuple(unpack(bytes(n.key)).tolist()) for n in tree.walk()}


# Who reads it.


@pytest.mark.parametrize("sharing", MODES)
def test_readers_of_every_salt_find_it_and_no_other_tenant(sharing: CacheSharing) -> None:
    cache = manager(sharing=sharing)
    prefix = publish(cache)
    for namespace in (ns("a"), ns("a", "salt"), ns("b"), ns("b", "other salt")):
        assert cache.peek(namespace, pack([*PROMPT, 9])) == (4, 0)
        assert serve(cache, namespace, [*PROMPT, 9]).cached_tokens == 4
    for namespace in (ns("other"), ns("other", "salt"), ns("stranger"), ns("A")):
        table = cache.open(namespace, pack([*PROMPT, 9]))
        assert table.cached_tokens == 0
        assert table.reason is not None
        assert table.reason.kind == "cold"
        cache.close(table, b"")
    audit(cache, [])
    assert public_pages(cache) == prefix.pages == 4


def test_nobody_finds_it_before_it_is_held() -> None:
    cache = manager()
    prefix = cache.publish("system", ["a"], pack(PROMPT))
    assert not cache.hold(prefix)  # nothing of it was computed
    assert cache.peek(ns("a"), pack([*PROMPT, 9]))[0] == 0
    serve(cache, prefix.namespace, PROMPT)
    assert cache.peek(ns("a"), pack([*PROMPT, 9]))[0] == 0
    assert cache.hold(prefix)
    assert not cache.hold(prefix)  # once
    assert cache.peek(ns("a"), pack([*PROMPT, 9]))[0] == 4
    audit(cache, [])


def test_half_of_it_cannot_be_held() -> None:
    cache = manager()
    prefix = cache.publish("system", ["a"], pack(PROMPT))
    serve(cache, prefix.namespace, PROMPT[:3])
    assert not cache.hold(prefix)
    audit(cache, [])


def test_an_adapter_does_not_read_it() -> None:
    cache = manager()
    publish(cache)
    adapted = Namespace(tenant="a", cache_salt=None, extra_key=None, adapter=1)
    assert cache.peek(adapted, pack([*PROMPT, 9]))[0] == 0
    assert serve(cache, adapted, [*PROMPT, 9]).cached_tokens == 0


@pytest.mark.parametrize("tokens", [PROMPT, PROMPT[:3], [1, 2, 3, 5, 6], [2, 3, 4, 5, 6]])
def test_only_the_whole_prefix_with_a_token_after_it_is_found(tokens: list[int]) -> None:
    cache = manager()
    publish(cache)
    assert serve(cache, ns("a"), tokens).cached_tokens == 0


def test_the_longest_of_several_is_read() -> None:
    cache = manager()
    publish(cache, [1, 2], name="short")
    publish(cache, PROMPT, readers=["a"], name="long")
    publish(cache, [*PROMPT, 5], readers=["other"], name="longer")
    tokens = [*PROMPT, 5, 6]
    found = {name: serve(cache, ns(name), tokens).cached_tokens for name in ("a", "b", "other")}
    assert found == {"a": 4, "b": 2, "other": 5}


def test_opting_out_of_the_lookup_reads_nothing() -> None:
    cache = manager()
    publish(cache)
    table = cache.open(ns("a"), pack([*PROMPT, 9]), lookup=False)
    assert table.cached_tokens == 0
    assert table.base is None
    audit(cache, [table])
    cache.close(table, b"")


def test_a_reader_reads_the_very_pages_of_the_prefix() -> None:
    cache = manager()
    prefix = publish(cache)
    tree = cache.forest.tree(prefix.namespace)
    assert tree is not None
    (node,) = tree.walk()
    first, second = (cache.open(ns(name), pack([*PROMPT, 9])) for name in ("a", "b"))
    assert first.pages[:4].tobytes() == bytes(node.pages) == second.pages[:4].tobytes()
    audit(cache, [first, second])
    cache.close(first, b"")
    cache.close(second, b"")


# What readers add.


def test_what_a_reader_adds_is_its_namespaces_alone() -> None:
    cache = manager()
    prefix = publish(cache)
    tokens = [*PROMPT, 5, 6, 7]
    assert serve(cache, ns("a", "salt"), tokens).cached_tokens == 4
    assert serve(cache, ns("a", "salt"), tokens).cached_tokens == 6
    for namespace in (ns("a"), ns("b"), ns("b", "salt")):
        assert cache.peek(namespace, pack([*tokens, 8]))[0] == 4
    # It is in the reader's tree, without the prefix, and counts for its tenant.
    assert edges(cache, ns("a", "salt")) == {(5, 6), (7,)}
    assert edges(cache, prefix.namespace) == {(1, 2, 3, 4)}
    assert cache.accounts.of("a").resident == 3
    # Without the prefix nothing of it is found: it means another text there.
    assert cache.peek(ns("a", "salt"), pack([5, 6, 7, 8]))[0] == 0


def test_a_continuation_is_found_again_after_its_tenant_lost_the_rest() -> None:
    cache = manager()
    publish(cache)
    serve(cache, ns("a"), [*PROMPT, 5, 6])
    table = cache.open(ns("a"), pack([*PROMPT, 5, 6, 7, 8]))
    assert table.cached_tokens == 6
    assert cache.grow(table, 8)
    cache.commit(table, pack([*PROMPT, 5, 6, 7, 8]))
    audit(cache, [table])
    assert cache.flush() == 0  # all of it is in use
    cache.close(table, pack([*PROMPT, 5, 6, 7, 8]))
    assert cache.flush() == 4
    audit(cache, [])
    assert cache.peek(ns("a"), pack([*PROMPT, 5, 6]))[0] == 4


def test_two_readers_of_a_namespace_compute_the_same_once() -> None:
    cache = manager()
    publish(cache)
    tokens = [*PROMPT, 5, 6]
    tables = [cache.open(ns("a"), pack(tokens)) for _ in range(2)]
    for table in tables:
        assert cache.grow(table, 6)
        cache.commit(table, pack(tokens))
        audit(cache, tables)
    assert tables[0].pages[:6].tobytes() == tables[1].pages[:6].tobytes()
    assert cache.accounts.of("a").held == 2
    for table in list(tables):
        cache.close(table, pack(tokens))
        tables.remove(table)
        audit(cache, tables)


def test_a_reader_that_opts_out_of_insertion_adds_nothing() -> None:
    cache = manager()
    publish(cache)
    table = cache.open(ns("a"), pack([*PROMPT, 5]), insert=False)
    assert table.cached_tokens == 4
    assert cache.grow(table, 5)
    cache.commit(table, pack([*PROMPT, 5]))
    cache.close(table, pack([*PROMPT, 5]))
    audit(cache, [])
    assert cache.forest.tree(ns("a")) is None


def test_a_tree_that_holds_more_of_the_prompt_goes_on_with_its_own() -> None:
    cache = manager()
    tokens = [*PROMPT, 5, 6]
    serve(cache, ns("a"), tokens)
    prefix = publish(cache)
    table = cache.open(ns("a"), pack([*tokens, 7]))
    assert (table.cached_tokens, table.base) == (6, None)
    cache.close(table, b"")
    assert serve(cache, ns("a"), [*tokens, 7]).cached_tokens == 6
    # Where both hold as much, and for other continuations, the public one is read.
    assert serve(cache, ns("a"), [*PROMPT, 8, 9]).cached_tokens == 4
    assert serve(cache, ns("a"), [*PROMPT, 8, 9]).cached_tokens == 5
    assert edges(cache, prefix.namespace) == {(1, 2, 3, 4)}


def test_reasons_behind_a_public_prefix() -> None:
    cache = manager()
    publish(cache)

    def reason(tokens: list[int]) -> tuple[str, int, int | None]:
        table = cache.open(ns("a"), pack([*PROMPT, *tokens]), insert=False)
        cache.close(table, b"")
        assert table.reason is not None
        assert table.reason.tokens == table.cached_tokens
        return table.reason.kind, table.reason.tokens, table.reason.at

    assert reason([5]) == ("hit", 4, None)
    serve(cache, ns("a"), [*PROMPT, 5, 6, 7])
    assert reason([5, 6, 9, 9]) == ("diverged", 6, 6)
    assert reason([8, 8]) == ("diverged", 4, 4)
    cache.flush(ns("a"))
    assert reason([5, 6, 9, 9]) == ("evicted", 4, 4)
    audit(cache, [])


def test_a_hit_on_a_public_prefix_counts_for_the_reader() -> None:
    cache = manager()
    prefix = publish(cache)
    before = cache.accounts.of(PUBLIC_TENANT).lookups
    serve(cache, ns("a"), [*PROMPT, 5])
    account = cache.accounts.of("a")
    assert (account.lookups, account.hits, account.hit_tokens) == (1, 1, 4)
    assert cache.accounts.of(PUBLIC_TENANT).lookups == before
    tree = cache.forest.tree(prefix.namespace)
    assert tree is not None
    assert [node.hits for node in tree.walk()] == [1]


def test_a_reader_that_starts_over_is_no_hit_of_its_own() -> None:
    cache = manager()
    prefix = publish(cache)
    table = cache.open(ns("a"), pack([*PROMPT, 5]), first=False)
    assert (table.cached_tokens, table.reason) == (4, None)
    cache.close(table, b"")
    audit(cache, [])
    tree = cache.forest.tree(prefix.namespace)
    assert tree is not None
    assert [node.hits for node in tree.walk()] == [0]


# Its room.


@pytest.mark.parametrize("sharing", MODES)
def test_no_tenant_takes_its_pages_or_its_room(sharing: CacheSharing) -> None:
    cache = manager(sharing=sharing)  # 24 pages are reserved
    publish(cache)
    for tenant in ("a", "b", "other"):
        table = cache.open(ns(tenant, "all"), pack([1]), insert=False)
        assert cache.grow(table, min(cache.rooms(tenant)))
        assert not cache.grow(table, table.length + 1)
        assert cache.accounts.of(tenant).held <= 36
        audit(cache, [table])
        cache.close(table, b"")
    assert public_pages(cache) == 4
    assert cache.flush() == 0
    assert cache.peek(ns("a"), pack([*PROMPT, 9]))[0] == 4


def test_public_prefixes_and_pins_share_a_budget() -> None:
    cache = manager(budget=0.15)  # 9 pages
    publish(cache)
    with pytest.raises(CacheError, match=r"public prefix more, .* needs 6 tokens; of the 9"):
        cache.publish("more", ["a"], pack([7] * 5))
    serve(cache, ns("a"), list(range(50, 60)))
    with pytest.raises(CacheError, match=r"the pin needs 6 tokens; of the 9 that .* 4 are taken"):
        cache.pin(ns("a"), pack(range(50, 56)))
    pin = cache.pin(ns("a"), pack(range(50, 55)))
    with pytest.raises(CacheError, match="9 are taken"):
        cache.publish("more", ["a"], pack([7]))
    cache.unpin(pin.id)
    cache.withdraw("system")
    publish(cache, [7] * 8, name="more")
    audit(cache, [])


def test_without_room_reserved_there_are_none() -> None:
    cache = manager(reserve_public=False)
    with pytest.raises(CacheError, match="nothing of the pool is kept for public prefixes"):
        cache.publish("system", ["a"], pack(PROMPT))


def test_a_prefix_shorter_than_a_page_is_refused() -> None:
    cache = manager(page_size=4)
    with pytest.raises(CacheError, match="3 tokens fill no page of 4; use a longer one"):
        cache.publish("system", ["a"], pack([1, 2, 3]))
    # What is beyond the last whole page is left to the readers.
    prefix = publish(cache, list(range(10)))
    assert prefix.pages == 2
    assert serve(cache, ns("a"), list(range(12))).cached_tokens == 8


# Another text, another list of readers, and the end of it.


def test_an_equal_registration_changes_nothing() -> None:
    cache = manager()
    prefix = publish(cache)
    assert cache.publish("system", ("b", "a", "a"), pack(PROMPT)) is prefix
    assert cache.peek(ns("a"), pack([*PROMPT, 9]))[0] == 4
    audit(cache, [])


def test_another_text_of_the_same_name_serves_no_old_continuation() -> None:
    cache = manager()
    publish(cache)
    serve(cache, ns("a"), [*PROMPT, 5, 6])
    old = cache.peek(ns("a"), pack([*PROMPT, 5, 6, 7]))[0]
    assert old == 6
    other = [9, 2, 3, 4]
    publish(cache, other)
    # The tokens after it are the same, and their keys and values are not.
    assert cache.peek(ns("a"), pack([*other, 5, 6, 7]))[0] == 4
    assert serve(cache, ns("a"), [*other, 5, 6, 7]).cached_tokens == 4
    assert cache.peek(ns("a"), pack([*PROMPT, 5, 6, 7]))[0] == 0
    assert public_pages(cache) == 4


def test_the_old_text_again_serves_no_continuation_of_the_first_time() -> None:
    """It is computed anew; what stands behind the first registration is not looked for."""
    cache = manager()
    first = publish(cache)
    serve(cache, ns("a"), [*PROMPT, 5, 6])
    publish(cache, [9, 2, 3, 4])
    again = publish(cache)
    assert again.id != first.id
    assert cache.peek(ns("a"), pack([*PROMPT, 5, 6, 7]))[0] == 4


def test_who_is_no_reader_any_more_finds_nothing() -> None:
    cache = manager()
    publish(cache)
    serve(cache, ns("b"), [*PROMPT, 5])
    publish(cache, readers=["a"])
    assert cache.peek(ns("a"), pack([*PROMPT, 9]))[0] == 4
    assert cache.peek(ns("b"), pack([*PROMPT, 5, 9]))[0] == 0


def test_a_registration_that_was_replaced_cannot_be_held() -> None:
    cache = manager()
    old = cache.publish("system", ["a"], pack(PROMPT))
    serve(cache, old.namespace, PROMPT)
    publish(cache, [9, 2, 3, 4])
    assert not cache.hold(old)
    assert cache.peek(ns("a"), pack([*PROMPT, 9]))[0] == 0
    audit(cache, [])


def test_withdrawn_it_is_gone_and_its_pages_are_free() -> None:
    cache = manager()
    publish(cache)
    serve(cache, ns("a"), [*PROMPT, 5, 6])
    cache.withdraw("system")
    audit(cache, [])
    assert public_pages(cache) == 0
    assert cache.peek(ns("a"), pack([*PROMPT, 5, 6, 7]))[0] == 0
    cache.withdraw("system")
    cache.withdraw("unknown")
    audit(cache, [])
    # What stood behind it can be evicted like everything else.
    assert cache.flush() == 2
    assert cache.pool.free == cache.pool.total


def test_withdrawn_while_it_is_read_the_reader_goes_on() -> None:
    cache = manager()
    publish(cache)
    tokens = [*PROMPT, 5, 6, 7]
    table = cache.open(ns("a"), pack(tokens))
    pages = table.pages[:4].tobytes()
    cache.withdraw("system")
    audit(cache, [table])
    assert public_pages(cache) == 4
    publish(cache, [9, 2, 3, 4], beside=[table])
    assert cache.grow(table, 7)
    cache.commit(table, pack(tokens))
    audit(cache, [table])
    assert table.pages[:4].tobytes() == pages
    assert cache.peek(ns("a"), pack([*tokens, 8]))[0] == 0
    cache.close(table, pack(tokens))
    audit(cache, [])


def test_withdrawn_while_it_is_read_it_is_gone_after_the_last_reader() -> None:
    cache = manager()
    prefix = publish(cache)
    table = cache.open(ns("a"), pack([*PROMPT, 5]))
    cache.withdraw("system")
    cache.close(table, b"")
    audit(cache, [])
    assert cache.forest.tree(prefix.namespace) is None
    assert cache.pool.free == cache.pool.total


def test_withdrawn_before_it_is_held_it_leaves_nothing() -> None:
    cache = manager()
    prefix = cache.publish("system", ["a"], pack(PROMPT))
    serve(cache, prefix.namespace, PROMPT)
    cache.withdraw("system")
    audit(cache, [])
    assert cache.pool.free == cache.pool.total


def test_many_registrations_fit_where_one_does() -> None:
    """Old ones make room, also those that somebody still read when they ended."""
    cache = manager(budget=0.1)  # 6 pages: one prefix of 4 and the page to compute it
    for number in range(10):
        tokens = [100 + number, 2, 3, 4]
        publish(cache, tokens)
        table = cache.open(ns("a"), pack([*tokens, 5]))
        assert table.cached_tokens == 4
        cache.withdraw("system")
        cache.close(table, b"")
        audit(cache, [])
    assert public_pages(cache) <= 6
