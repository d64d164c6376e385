"""What a file of tenants says, and whether it may say so.

[tenants.NAME]
label = "Acme, production"              # optional, for people
weight = 1.0                            # optional
cache_floor = 0.1                       # optional, part of the pool
cache_cap = 0.5                         # optional, part of the pool
cache_ttl = 3600                        # optional, seconds
keys = ["sha256:<64 hex digits>"]       # required; empty shuts the tenant out

[tenants.NAME.limits]                   # optional
max_concurrent_requests = 8
max_context = 4096

[[public]]                              # optional, any number
name = "house-rules"
tenants = ["acme"]
system = "You are ..."                  # or text = "..."
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ktserve.tenancy.tenant import Limits, PublicPrefix, Quota, Tenant

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NAME_RULE = "1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or a digit"
MAX_LABEL_CHARACTERS = 200
MAX_WEIGHT = 1_000_000
MAX_TTL = 10 * 365 * 24 * 3600
KEY_PREFIX = "sha256:"

_KEY = re.compile(rf"{KEY_PREFIX}([0-9a-fA-F]{{64}})")
_TENANT_FIELDS = ("label", "weight", "cache_floor", "cache_cap", "cache_ttl", "keys", "limits")
_PUBLIC_FIELDS = ("name", "tenants", "system", "text")
_LIMIT_FIELDS = ("max_concurrent_requests", "max_context")

Entry = tuple[Tenant, tuple[bytes, ...]]
"""A tenant and the SHA-256 digests of its keys."""


class TenantsFile(NamedTuple):
    """What a file says, in its order."""

    entries: list[Entry]
    public: tuple[PublicPrefix, ...]


class TenantsFileError(ValueError):
    """A file of tenants cannot be used.

    Attributes:
        problems: each names the file, the place in it, the rule and the remedy. No key is in them,
            nor what stands in a key's place, since that may be a key that was pasted by mistake.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class TenantsFileUnreadable(TenantsFileError):
    """There is no such file, or this user may not read it."""


def read_tenants_file(path: Path, *, need_key: bool) -> TenantsFile:
    """What the file at ``path`` says.

    Args:
        need_key: refuse a file in which no tenant has a key.

    Raises:
        TenantsFileError: it cannot be read, or breaks rules; every problem is in it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TenantsFileUnreadable(
            [f"{path}: cannot be read ({error.strerror}); check the path and its permissions"]
        ) from None
    parsed = parse_tenants(data, str(path))
    if need_key and not any(digests for _, digests in parsed.entries):
        raise TenantsFileError(
            [
                f"{path}: no tenant has a key, so that nobody could use the server; "
                "add one with 'ktserve tenants new NAME'"
            ]
        )
    return parsed


def parse_tenants(data: bytes, source: str) -> TenantsFile:
    """What ``data``, the bytes of a file, says; possibly nothing.

    Args:
        source: the file's name, for messages.

    Raises:
        TenantsFileError: the content breaks rules.
    """
    parser = _Parser(source)
    parsed = parser.document(load_toml(data, source))
    if parser.problems:
        raise TenantsFileError(parser.problems)
    return parsed


def load_toml(data: bytes, source: str) -> dict[str, Any]:
    """``data`` as TOML, its content unchecked.

    Raises:
        TenantsFileError: it is no TOML.
    """
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 (byte {error.start}); save it as UTF-8"
    except tomllib.TOMLDecodeError as error:
        problem = f"is not valid TOML: {error}; mend that place"
    raise TenantsFileError([f"{source}: {problem}"])


def check_name(name: str) -> str | None:
    """What is wrong with ``name`` as a tenant's, or None."""
    if NAME.fullmatch(name):
        return None
    return f"the name {name[:80]!r} is not allowed; use {NAME_RULE}"


@dataclass
class _Parser:
    """Reads one document and gathers what is wrong with it."""

    source: str
    problems: list[str] = field(default_factory=list)
    owners: dict[bytes, str] = field(default_factory=dict)

    def document(self, document: dict[str, Any]) -> TenantsFile:
        self._unknown("the file", document, ("tenants", "public"))
        tables = document.get("tenants", {})
        if not isinstance(tables, dict):
            self._add("tenants", "must be a table; write each tenant as [tenants.NAME]")
            return TenantsFile([], ())
        entries = [self._tenant(name, table) for name, table in tables.items()]
        floors = sum(tenant.quota.cache_floor or 0.0 for tenant, _ in entries)
        if floors > 1 + 1e-9:
            self._add(
                "tenants",
                f"the cache_floor of all tenants add up to {floors:g}; they are parts of one pool,"
                " so lower them to 1 or less together",
            )
        public = document.get("public", [])
        if not isinstance(public, list):
            self._add("public", "must be a list of tables; write each as [[public]]")
            return TenantsFile(entries, ())
        prefixes = [self._prefix(place, table, tables) for place, table in enumerate(public, 1)]
        named = [prefix.name for prefix in prefixes if prefix is not None]
        for name in sorted({name for name in named if named.count(name) > 1}):
            self._add("[[public]]", f"the name {name!r} is there twice; give each its own")
        return TenantsFile(entries, tuple(one for one in prefixes if one is not None))

    def _tenant(self, name: str, table: object) -> Entry:
        place = f"[tenants.{name}]" if NAME.fullmatch(name) else f"[tenants.{name[:80]!r}]"
        if problem := check_name(name):
            self._add(place, problem)
        if not isinstance(table, dict):
            self._add(place, "must be a table; write [tenants.NAME] and its fields below it")
            return Tenant(name), ()
        self._unknown(place, table, _TENANT_FIELDS)
        tenant = Tenant(
            name=name,
            label=self._label(place, table.get("label")),
            quota=self._quota(place, table),
            limits=self._limits(f"[tenants.{name}.limits]", place, table.get("limits", {})),
        )
        if "keys" not in table:
            self._add(
                place,
                f"keys is missing; write keys = [] and then 'ktserve tenants add-key {name}'",
            )
            return tenant, ()
        return tenant, tuple(self._keys(name, place, table["keys"]))

    def _label(self, place: str, label: object) -> str | None:
        if label is None:
            return None
        if not isinstance(label, str) or not 1 <= len(label) <= MAX_LABEL_CHARACTERS:
            self._add(place, f"label must be text of 1 to {MAX_LABEL_CHARACTERS} characters")
            return None
        return label

    def _quota(self, place: str, table: dict[str, Any]) -> Quota:
        floor = self._part(place, table, "cache_floor")
        cap = self._part(place, table, "cache_cap")
        if floor is not None and cap is not None and floor > cap:
            self._add(
                place,
                f"cache_floor {floor:g} is above cache_cap {cap:g}; lower it or raise the cap",
            )
        ttl = table.get("cache_ttl")
        if ttl is not None and not (type(ttl) in (int, float) and 1 <= ttl <= MAX_TTL):
            self._add(
                place,
                f"cache_ttl must be a number of seconds from 1 to {MAX_TTL:,}; leave it out"
                " to keep namespaces for ever",
            )
            ttl = None
        weight = self._weight(place, table.get("weight", 1.0))
        return Quota(weight, floor, cap, None if ttl is None else float(ttl))

    def _part(self, place: str, table: dict[str, Any], name: str) -> float | None:
        value = table.get(name)
        if value is None:
            return None
        if type(value) in (int, float) and 0 < value <= 1:
            return float(value)
        self._add(place, f"{name} must be a part of the pool: a number above 0, at most 1")
        return None

    def _prefix(self, number: int, table: object, tenants: dict[str, Any]) -> PublicPrefix | None:
        place = f"[[public]] number {number}"
        if not isinstance(table, dict):
            self._add(place, "must be a table; write [[public]] and its fields below it")
            return None
        before = len(self.problems)
        self._unknown(place, table, _PUBLIC_FIELDS)
        name = table.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            self._add(place, f"name must be text: {NAME_RULE}")
        readers = table.get("tenants")
        if not isinstance(readers, list) or not readers:
            self._add(place, 'tenants must be a list of names, of one at least: tenants = ["acme"]')
        else:
            for reader in readers:
                if not isinstance(reader, str) or reader not in tenants:
                    self._add(
                        place,
                        f"tenants names {str(reader)[:80]!r}, which the file does not have; write"
                        " it as [tenants.NAME] or remove it",
                    )
        texts = [table[field] for field in ("system", "text") if field in table]
        if len(texts) != 1 or not isinstance(texts[0], str) or not texts[0]:
            self._add(place, "needs one of system and text, which must not be empty")
        if len(self.problems) > before:
            return None
        return PublicPrefix(
            table["name"], tuple(table["tenants"]), table.get("system"), table.get("text")
        )

    def _weight(self, place: str, weight: Any) -> float:
        if type(weight) in (int, float) and 0 < weight <= MAX_WEIGHT:
            return float(weight)
        self._add(
            place,
            f"weight must be a number above 0, at most {MAX_WEIGHT:,}; leave it out for 1.0",
        )
        return 1.0

    def _limits(self, place: str, tenant_place: str, limits: object) -> Limits:
        if not isinstance(limits, dict):
            self._add(tenant_place, "limits must be a table; write [tenants.NAME.limits]")
            return Limits()
        self._unknown(place, limits, _LIMIT_FIELDS)
        return Limits(
            max_concurrent_requests=self._count(place, limits, "max_concurrent_requests", 1),
            # One token of prompt and one of output.
            max_context=self._count(place, limits, "max_context", 2),
        )

    def _count(self, place: str, limits: dict[str, Any], name: str, least: int) -> int | None:
        value = limits.get(name)
        if value is None:
            return None
        if type(value) is not int or value < least:
            self._add(
                place, f"{name} must be a whole number from {least}; leave it out for no limit"
            )
            return None
        return value

    def _keys(self, name: str, place: str, keys: object) -> Iterable[bytes]:
        if not isinstance(keys, list):
            self._add(place, f'keys must be a list; write keys = ["{KEY_PREFIX}…"]')
            return
        for index, key in enumerate(keys):
            match = _KEY.fullmatch(key) if isinstance(key, str) else None
            if match is None:
                self._add(
                    place,
                    f"keys[{index}] must be '{KEY_PREFIX}' and 64 hex digits, the SHA-256 of a key "
                    "and not the key itself; 'ktserve tenants add-key' writes it",
                )
                continue
            digest = bytes.fromhex(match[1])
            owner = self.owners.setdefault(digest, name)
            if owner != name:
                self._add(
                    place,
                    f"keys[{index}] is also a key of the tenant {owner!r}, and a key names one "
                    "tenant; remove one of the two",
                )
            yield digest

    def _unknown(self, place: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
        for name in table:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
                self._add(place, f"unknown field {name[:80]!r}; {remedy}")

    def _add(self, place: str, problem: str) -> None:
        self.problems.append(f"{self.source}: {place}: {problem}")
