"""Who a key belongs to, what a file of tenants may say, and how the commands change it."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ktserve.cli.exit_codes import ExitCode
from ktserve.cli.tenants import app
from ktserve.config import Settings
from ktserve.tenancy import tenants as tenants_module
from ktserve.tenancy.tenants import (
    AuthenticationError,
    Limits,
    PublicPrefix,
    Quota,
    Roster,
    Tenant,
    Tenants,
    hash_key,
    load_roster,
)
from ktserve.tenancy.tenants_edit import add_key, add_tenant, new_api_key
from ktserve.tenancy.tenants_file import TenantsFileError, parse_tenants, read_tenants_file


def entry(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


FILE = f"""\
# The tenants of this machine.
[tenants.acme]
label = "Acme, production"
weight = 2.5
keys = ["{entry("acme-1")}", "{entry("acme-2")}"]

[tenants.acme.limits]
max_concurrent_requests = 8
max_context = 4096

[tenants."beta.eu"]   # small
keys = [
    "{entry("beta-1")}",  # laptop
]
"""


A = "[tenants.a]\nkeys = []\n"
PUBLIC = "[[public]]\nname = 'p'\ntenants = ['a']\ntext = 'x'\n"


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "tenants.toml"
        path.write_bytes(text.encode())
        return path

    return write


def load(settings: Settings) -> Tenants:
    return Tenants(load_roster(settings))


def problems(text: str) -> list[str]:
    with pytest.raises(TenantsFileError) as caught:
        parse_tenants(text.encode(), "t.toml")
    return caught.value.problems


# What the file says


def test_a_file_gives_tenants_in_its_order(written: Callable[[str], Path]) -> None:
    tenants = load(Settings(tenants=str(written(FILE))))
    assert list(tenants) == [
        Tenant("acme", "Acme, production", Quota(2.5), Limits(8, 4096)),
        Tenant("beta.eu"),
    ]
    assert len(tenants) == 2
    assert tenants.needs_key


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tenant = 1", "t.toml: the file: unknown field 'tenant'; did you mean tenants?"),
        ("tenants = 1", "t.toml: tenants: must be a table; write each tenant as [tenants.NAME]"),
        ("[tenants]\na = 1", "t.toml: [tenants.a]: must be a table; "),
        ("[tenants.a]", "t.toml: [tenants.a]: keys is missing; "),
        ("[tenants.A]\nkeys = []", "[tenants.'A']: the name 'A' is not allowed; use 1 to 64 of"),
        ('[tenants."-a"]\nkeys = []', "the name '-a' is not allowed"),
        ('[tenants.""]\nkeys = []', "the name '' is not allowed"),
        ('[tenants."a\\u001b"]\nkeys = []', r"the name 'a\x1b' is not allowed"),
        (f"[tenants.{'a' * 65}]\nkeys = []", "is not allowed"),
        ("[tenants.a]\nkeys = []\nwieght = 1", "unknown field 'wieght'; did you mean weight?"),
        ("[tenants.a]\nkeys = []\nfoo = 1", "unknown field 'foo'; known are label, weight, "),
        ("[tenants.a]\nkeys = []\nlabel = ''", "label must be text of 1 to 200 characters"),
        ("[tenants.a]\nkeys = []\nlabel = 1", "label must be text"),
        ("[tenants.a]\nkeys = []\nweight = 0", "weight must be a number above 0"),
        ("[tenants.a]\nkeys = []\nweight = -1", "weight must be"),
        ("[tenants.a]\nkeys = []\nweight = nan", "weight must be"),
        ("[tenants.a]\nkeys = []\nweight = inf", "weight must be"),
        ("[tenants.a]\nkeys = []\nweight = true", "weight must be"),
        ("[tenants.a]\nkeys = []\nweight = 1" + "0" * 400, "weight must be"),
        ("[tenants.a]\nkeys = []\nlimits = 1", "limits must be a table"),
        (
            "[tenants.a]\nkeys = []\nlimits.max_contxt = 9",
            "[tenants.a.limits]: unknown field 'max_contxt'; did you mean max_context?",
        ),
        (
            "[tenants.a]\nkeys = []\nlimits.max_concurrent_requests = 0",
            "[tenants.a.limits]: max_concurrent_requests must be a whole number from 1; ",
        ),
        ("[tenants.a]\nkeys = []\nlimits.max_context = 1", "max_context must be a whole number"),
        ("[tenants.a]\nkeys = []\nlimits.max_context = 9.0", "max_context must be"),
        ("[tenants.a]\nkeys = []\nlimits.max_context = true", "max_context must be"),
        ("[tenants.a]\nkeys = 'sha256:00'", "keys must be a list"),
        ("[tenants.a]\nkeys = [1]", "keys[0] must be 'sha256:' and 64 hex digits"),
        ("[tenants.a]\nkeys = ['sha256:00']", "keys[0] must be"),
        (f"[tenants.a]\nkeys = ['{entry('k')} ']", "keys[0] must be"),
        (
            f"[tenants.a]\nkeys = ['{entry('k')}']\n[tenants.b]\nkeys = ['{entry('k')}']",
            "[tenants.b]: keys[0] is also a key of the tenant 'a'",
        ),
        ("[tenants.a", "t.toml: is not valid TOML: "),
        (A + "cache_floor = 0", "[tenants.a]: cache_floor must be a part of the pool"),
        (A + "cache_floor = 1.01", "cache_floor must be"),
        (A + "cache_floor = nan", "cache_floor must be"),
        (A + "cache_cap = true", "cache_cap must be"),
        (A + "cache_cap = '1'", "cache_cap must be"),
        (A + "cache_floor = 0.6\ncache_cap = 0.5", "cache_floor 0.6 is above cache_cap 0.5"),
        (A + "cache_ttl = 0", "cache_ttl must be a number of seconds from 1"),
        (A + "cache_ttl = inf", "cache_ttl must be"),
        (A + "cache_ttl = false", "cache_ttl must be"),
        (
            A + "cache_floor = 0.6\n[tenants.b]\nkeys = []\ncache_floor = 0.5",
            "t.toml: tenants: the cache_floor of all tenants add up to 1.1",
        ),
        ("public = 1", "t.toml: public: must be a list of tables"),
        ("public = [1]", "[[public]] number 1: must be a table"),
        (A + PUBLIC + "txt = 'x'", "[[public]] number 1: unknown field 'txt'; did you mean text?"),
        (A + "[[public]]\ntenants = ['a']\ntext = 'x'", "number 1: name must be text: 1 to 64"),
        (A + "[[public]]\nname = 'X'\ntenants = ['a']\ntext = 'x'", "name must be text"),
        (A + "[[public]]\nname = 'p'\ntext = 'x'", "tenants must be a list of names"),
        (A + "[[public]]\nname = 'p'\ntenants = []\ntext = 'x'", "tenants must be a list"),
        (A + "[[public]]\nname = 'p'\ntenants = ['b']\ntext = 'x'", "tenants names 'b', which"),
        (A + "[[public]]\nname = 'p'\ntenants = [[1]]\ntext = 'x'", "tenants names '[1]', which"),
        (A + "[[public]]\nname = 'p'\ntenants = ['a']", "needs one of system and text"),
        (A + PUBLIC + "system = 'x'", "needs one of system and text"),
        (A + "[[public]]\nname = 'p'\ntenants = ['a']\ntext = ''", "must not be empty"),
        (A + PUBLIC + PUBLIC, "[[public]]: the name 'p' is there twice"),
    ],
)
def test_a_broken_rule_is_named_with_its_place(text: str, problem: str) -> None:
    found = problems(text)
    assert len(found) == 1
    assert problem in found[0]


def test_quotas_and_public_prefixes_are_read_as_they_stand() -> None:
    file = parse_tenants(
        (
            A
            + "weight = 2\ncache_floor = 0.25\ncache_cap = 1\ncache_ttl = 60\n"
            + "[tenants.b]\nkeys = []\ncache_floor = 0.75\n"
            + PUBLIC
            + "[[public]]\nname = 'q'\ntenants = ['b', 'a']\nsystem = 'Hello'\n"
        ).encode(),
        "t.toml",
    )
    assert [tenant.quota for tenant, _ in file.entries] == [
        Quota(2.0, 0.25, 1.0, 60.0),
        Quota(cache_floor=0.75),
    ]
    assert file.public == (
        PublicPrefix("p", ("a",), text="x"),
        PublicPrefix("q", ("b", "a"), system="Hello"),
    )


def test_a_server_gets_quotas_and_public_prefixes(written: Callable[[str], Path]) -> None:
    roster = load_roster(Settings(tenants=str(written(FILE + PUBLIC.replace("'a'", "'acme'")))))
    assert roster.quotas == {"acme": Quota(2.5), "beta.eu": Quota()}
    assert [prefix.name for prefix in roster.public] == ["p"]
    assert load_roster(Settings()).public == ()


def test_tenants_and_keys_are_added_to_a_file_with_public_prefixes(
    written: Callable[[str], Path],
) -> None:
    path = written(FILE + PUBLIC.replace("'a'", "'acme'"))
    add_tenant(path, "new", None, new_api_key())
    add_key(path, "new", new_api_key())
    add_key(path, "acme", new_api_key())
    file = read_tenants_file(path, need_key=True)
    assert [(tenant.name, len(keys)) for tenant, keys in file.entries] == [
        ("acme", 3),
        ("beta.eu", 1),
        ("new", 2),
    ]
    assert file.public == (PublicPrefix("p", ("acme",), text="x"),)


def test_hex_digits_of_either_case_are_one_key() -> None:
    upper = entry("k").upper().replace("SHA256", "sha256")
    found = problems(f"[tenants.a]\nkeys = ['{entry('k')}']\n[tenants.b]\nkeys = ['{upper}']")
    assert "also a key of the tenant 'a'" in found[0]


def test_every_problem_is_reported_at_once() -> None:
    assert len(problems("[tenants.A]\nweight = 0\nfoo = 1")) == 4


def test_a_key_pasted_by_mistake_is_not_repeated() -> None:
    key = new_api_key()
    text = "\n".join(problems(f"[tenants.a]\nkeys = ['{key}', 7]"))
    assert "keys[0]" in text
    assert key not in text


def test_bytes_that_are_no_utf_8_are_refused() -> None:
    with pytest.raises(TenantsFileError, match=r"not UTF-8 \(byte 5\)"):
        parse_tenants(b"# abc\xff", "t.toml")


def test_a_file_that_lets_nobody_in_is_refused(written: Callable[[str], Path]) -> None:
    path = written("[tenants.a]\nkeys = []\n")
    with pytest.raises(TenantsFileError, match="no tenant has a key"):
        load(Settings(tenants=str(path)))
    assert read_tenants_file(path, need_key=False) == ([(Tenant("a"), ())], ())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TenantsFileError, match=r"t\.toml: cannot be read"):
        load(Settings(tenants=str(tmp_path / "t.toml")))


# Who a key belongs to


@pytest.mark.parametrize(
    ("key", "name"), [("acme-1", "acme"), ("acme-2", "acme"), ("beta-1", "beta.eu")]
)
def test_each_key_is_its_tenants(key: str, name: str, written: Callable[[str], Path]) -> None:
    tenants = load(Settings(tenants=str(written(FILE))))
    assert tenants.authenticate(key).name == name


@pytest.mark.parametrize(
    "key",
    ["", "acme", "acme-1 ", " acme-1", "ACME-1", entry("acme-1"), "acme-1\x00", "\ud800", "ä"],
)
def test_any_other_key_is_refused_in_one_way(key: str, written: Callable[[str], Path]) -> None:
    tenants = load(Settings(tenants=str(written(FILE))))
    with pytest.raises(AuthenticationError) as caught:
        tenants.authenticate(key)
    assert str(caught.value) == "the API key is not valid; check the key, or ask for one"


def test_no_key_is_told_how_to_send_one(written: Callable[[str], Path]) -> None:
    tenants = load(Settings(tenants=str(written(FILE))))
    with pytest.raises(AuthenticationError, match="Authorization: Bearer"):
        tenants.authenticate(None)


def test_the_single_key_is_the_default_tenants() -> None:
    tenants = load(Settings(api_key="the key"))
    assert tenants.authenticate("the key") == Tenant("default")
    assert (len(tenants), tenants.needs_key) == (1, True)
    for wrong in (None, "", "the kez"):
        with pytest.raises(AuthenticationError):
            tenants.authenticate(wrong)


@pytest.mark.parametrize("key", [None, "", "anything"])
def test_an_open_server_is_the_default_tenants(key: str | None) -> None:
    tenants = load(Settings())
    assert tenants.authenticate(key) == Tenant("default")
    assert (len(tenants), tenants.needs_key) == (1, False)


@pytest.mark.parametrize("key", ["k0", "k1", "k2", "none of them"])
def test_every_key_is_compared_wherever_the_match_is(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def counting(known: bytes, presented: bytes) -> bool:
        compared.append(known)
        return compare(known, presented)

    monkeypatch.setattr(tenants_module.hmac, "compare_digest", counting)
    known = [hash_key(f"k{number}") for number in range(3)]
    tenants = Tenants(
        Roster(
            entries=((Tenant("a"), tuple(known[:2])), (Tenant("b"), tuple(known[2:]))),
            open_tenant=None,
        )
    )
    try:
        tenants.authenticate(key)
    except AuthenticationError:
        assert key == "none of them"
    assert compared == known


def test_no_representation_shows_a_key(written: Callable[[str], Path]) -> None:
    for settings in (Settings(api_key="the key"), Settings(tenants=str(written(FILE)))):
        shown = repr(load(settings))
        assert shown.startswith("<Tenants: ")
        for key in ("the key", "acme-1"):
            assert key not in shown
            assert hash_key(key).hex() not in shown
            assert repr(hash_key(key)) not in shown


# Changing the file


def test_a_new_key_has_256_random_bits() -> None:
    keys = {new_api_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"kts-[A-Za-z0-9_-]{43}", key) for key in keys)


def test_a_new_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    add_tenant(path, "acme", None, "k")
    assert path.stat().st_mode & 0o777 == 0o600
    assert load(Settings(tenants=str(path))).authenticate("k") == Tenant("acme")
    assert [each.name for each in tmp_path.iterdir()] == ["tenants.toml"]


@pytest.mark.parametrize("text", [FILE, FILE.rstrip("\n"), FILE.replace("\n", "\r\n"), "# none\n"])
def test_a_new_tenant_goes_after_what_was_there(text: str, written: Callable[[str], Path]) -> None:
    path = written(text)
    path.chmod(0o640)
    add_tenant(path, "new.one", 'A "new" \\ one\né', "k")
    after = path.read_bytes().decode()
    assert after.startswith(text)
    assert ("\r\n" in after) == ("\r\n" in text)
    assert not re.search(r"[^\r]\n", after) or "\r\n" not in text
    assert path.stat().st_mode & 0o777 == 0o640
    tenant = load(Settings(tenants=str(path))).authenticate("k")
    assert tenant == Tenant("new.one", 'A "new" \\ one\né')


@pytest.mark.parametrize(
    "text",
    [
        FILE,
        FILE.replace("\n", "\r\n"),
        '[tenants."beta.eu"]\nkeys = []\n',
        '[tenants."beta.eu"]\nkeys=[ ]',
        '[tenants."beta.eu"]\nkeys = [\n]\n',
        '[tenants]\n"beta.eu" = { keys = [] }\n',
        'tenants."beta.eu".keys = []\n',
        '[tenants."beta.eu"]\n"keys" = []\n',
        f"[tenants.a]\nkeys = []\n[tenants.'beta.eu']\nkeys = ['{entry('x')}']",
        '[tenants.a]\nlabel = "[tenants.beta.eu] keys = ["\nkeys = []\n'
        '# keys = [\n[tenants."beta.eu"]\nkeys = [# keys = [\n]\n',
    ],
)
def test_a_further_key_changes_nothing_else(text: str, written: Callable[[str], Path]) -> None:
    path = written(text)
    before: dict[str, Any] = tomllib.loads(text)
    add_key(path, "beta.eu", "k")
    after = path.read_bytes().decode()
    wanted = [entry("k"), *before["tenants"]["beta.eu"]["keys"]]
    before["tenants"]["beta.eu"]["keys"] = wanted
    assert tomllib.loads(after) == before
    # What was added is one run of text: without it the file is as it was.
    start = after.index(entry("k"))
    assert any(
        after[: start - before_it] + after[start + len(entry("k")) + after_it :] == text
        for before_it in range(20)
        for after_it in range(20)
    )


def test_keys_of_one_tenant_in_lines_stay_in_lines(written: Callable[[str], Path]) -> None:
    path = written(FILE)
    add_key(path, "beta.eu", "k")
    assert (
        f'keys = [\n    "{entry("k")}",\n    "{entry("beta-1")}",  # laptop\n' in path.read_text()
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: add_tenant(path, "acme", None, "k"), "the tenant 'acme' exists"),
        (lambda path: add_tenant(path, "Acme", None, "k"), "is not allowed"),
        (lambda path: add_tenant(path, "a\n[b]", None, "k"), "is not allowed"),
        (lambda path: add_tenant(path, "new", "", "k"), "label must have 1 to 200"),
        (lambda path: add_tenant(path, "new", "\ud800", "k"), "lone surrogates"),
        (lambda path: add_key(path, "nobody", "k"), "there is no tenant 'nobody'"),
    ],
)
def test_a_change_that_cannot_be_leaves_the_file(
    change: Callable[[Path], None], problem: str, written: Callable[[str], Path]
) -> None:
    path = written(FILE)
    with pytest.raises(TenantsFileError, match=problem):
        change(path)
    assert path.read_text() == FILE
    assert [each.name for each in path.parent.iterdir()] == ["tenants.toml"]


def test_a_broken_file_is_not_changed(written: Callable[[str], Path]) -> None:
    path = written("[tenants.a]\nkeys = ['x']\n")
    with pytest.raises(TenantsFileError, match=r"keys\[0\] must be"):
        add_tenant(path, "b", None, "k")
    assert path.read_text() == "[tenants.a]\nkeys = ['x']\n"


def test_a_layout_without_room_is_refused(written: Callable[[str], Path]) -> None:
    text = "tenants = { a = { keys = [] } }\n"
    path = written(text)
    with pytest.raises(TenantsFileError, match="leaves no room"):
        add_tenant(path, "b", None, "k")
    assert path.read_text() == text


def test_a_link_stays_a_link(written: Callable[[str], Path], tmp_path: Path) -> None:
    path = written(FILE)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    add_key(link, "acme", "k")
    assert link.is_symlink()
    assert load(Settings(tenants=str(path))).authenticate("k").name == "acme"


def test_changes_at_once_lose_nothing(written: Callable[[str], Path]) -> None:
    path = written(FILE)
    threads = [
        threading.Thread(target=add_key, args=(path, "acme", f"k{number}")) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tenants = load(Settings(tenants=str(path)))
    assert {tenants.authenticate(f"k{number}").name for number in range(8)} == {"acme"}


# The commands


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_new_and_add_key_print_a_key_that_works(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    first = run("new", "acme", "--file", path, "--label", "Acme")
    second = run("add-key", "acme", "--file", path)
    assert (first.exit_code, second.exit_code) == (0, 0)
    tenants = load(Settings(tenants=str(path)))
    for result in (first, second):
        key = result.stdout.removesuffix("\n")
        assert tenants.authenticate(key).name == "acme"
        assert key not in result.stderr
        assert key not in path.read_text()


@pytest.mark.parametrize("command", ["new", "add-key"])
def test_a_name_that_cannot_be_is_a_usage_error_without_a_key(command: str, tmp_path: Path) -> None:
    result = run(command, "No\x1b[2J", "--file", tmp_path / "tenants.toml")
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert result.stderr.startswith(f"ktserve tenants {command}: ")
    assert "\x1b" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_list_shows_tenants_and_no_key(written: Callable[[str], Path]) -> None:
    path = written(FILE.replace("Acme, production", "Acme\\u001b[2J \\u202e"))
    table = run("list", "--file", path).stdout
    assert [line.split()[:8] for line in table.splitlines()[1:]] == [
        ["acme", "2", "2.5", "-", "-", "-", "8", "4096"],
        ["beta.eu", "1", "1", "-", "-", "-", "-", "-"],
    ]
    shown = run("list", "--json", "--file", path).stdout
    assert [(each["name"], each["keys"]) for each in json.loads(shown)] == [
        ("acme", 2),
        ("beta.eu", 1),
    ]
    assert json.loads(shown)[0]["label"] == "Acme\x1b[2J \u202e"
    for text in (table, shown):
        assert hash_key("acme-1").hex() not in text
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_check_answers_with_its_exit_code(written: Callable[[str], Path], tmp_path: Path) -> None:
    good = run("check", written(FILE))
    assert (good.exit_code, "2 tenants, 3 keys" in good.stdout) == (ExitCode.GOOD, True)
    bad = run("check", written("[tenants.A]\nweight = 0\n"))
    assert bad.exit_code == ExitCode.CHECK_FAILED
    assert len(bad.stderr.splitlines()) == 3
    assert run("check", tmp_path / "none.toml").exit_code == ExitCode.USAGE
