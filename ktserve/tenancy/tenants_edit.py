"""New tenants and keys, written into a file of tenants that stays otherwise as it is.

A change is made on the file's bytes: comments, order and layout are kept. What the new bytes say is
then compared with what they should say, and only if they agree do they replace the file, whole.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ktserve.tenancy.tenants import hash_key
from ktserve.tenancy.tenants_file import (
    KEY_PREFIX,
    MAX_LABEL_CHARACTERS,
    TenantsFileError,
    check_name,
    load_toml,
    parse_tenants,
)

API_KEY_PREFIX = "kts-"
_KEY_BYTES = 32
_ARRAY_OF_KEYS = re.compile(r"""\bkeys["']?[ \t]*=[ \t]*\[""")
_HEADER = re.compile(r"^[ \t]*\[([^\n]*)", re.MULTILINE)


def new_api_key() -> str:
    """A key: ``kts-`` and 256 random bits in URL-safe base64, 47 characters in all."""
    random = base64.urlsafe_b64encode(secrets.token_bytes(_KEY_BYTES)).rstrip(b"=")
    return API_KEY_PREFIX + random.decode()


def add_tenant(path: Path, name: str, label: str | None, api_key: str) -> None:
    """Append the tenant ``name`` with its first key to the file, which is made if there is none.

    Raises:
        TenantsFileError: the name or label is not allowed, the tenant exists, or the file cannot be
            read, understood or written; it is then as it was.
    """
    if problem := check_name(name):
        raise TenantsFileError([problem])
    if label is not None and not 1 <= len(label) <= MAX_LABEL_CHARACTERS:
        raise TenantsFileError([f"the label must have 1 to {MAX_LABEL_CHARACTERS} characters"])
    entry = _entry(api_key)
    table: dict[str, Any] = {"keys": [entry]}
    if label is not None:
        table["label"] = label

    def edit(text: str, document: dict[str, Any]) -> str:
        if name in document.get("tenants", {}):
            raise TenantsFileError(
                [
                    f"{path}: the tenant {name!r} exists; give it another key with "
                    f"'ktserve tenants add-key {name}'"
                ]
            )
        wanted = copy.deepcopy(document)
        wanted.setdefault("tenants", {})[name] = table
        newline = "\r\n" if "\r\n" in text else "\n"
        lines = [f"[tenants.{name if '.' not in name else _quoted(name)}]"]
        lines += [] if label is None else [f"label = {_quoted(label)}"]
        lines += [f'keys = ["{entry}"]', ""]
        gap = "" if not text else newline if text.endswith("\n") else newline * 2
        return _verified(text + gap + newline.join(lines), wanted, path)

    _rewrite(path, edit, create=True)


def add_key(path: Path, name: str, api_key: str) -> None:
    """Add a key to the tenant ``name``; its others stay valid.

    Raises:
        TenantsFileError: there is no such tenant, or the file cannot be read, understood or
            written; it is then as it was.
    """
    entry = _entry(api_key)

    def edit(text: str, document: dict[str, Any]) -> str:
        if name not in document.get("tenants", {}):
            raise TenantsFileError(
                [
                    f"{path}: there is no tenant {name[:80]!r}; make it with "
                    "'ktserve tenants new', or see 'ktserve tenants list'"
                ]
            )
        wanted = copy.deepcopy(document)
        wanted["tenants"][name]["keys"].insert(0, entry)
        # The array is found by trying: a place is right if the key put there arrives where it
        # should and nothing else changes. Comments and strings that look like one cannot fool that.
        for at in _arrays_of_keys(text, name):
            with contextlib.suppress(TenantsFileError):
                return _verified(_inserted(text, at, f'"{entry}"'), wanted, path)
        raise TenantsFileError(
            [
                f"{path}: no place for the key was found; add this line to the keys of {name!r} "
                f'by hand: "{entry}"'
            ]
        )

    _rewrite(path, edit, create=False)


def _entry(api_key: str) -> str:
    return KEY_PREFIX + hash_key(api_key).hex()


def _arrays_of_keys(text: str, name: str) -> list[int]:
    """Offsets just inside what looks like an array of keys, those near ``name`` first."""
    headers = [(match.start(), match[1]) for match in _HEADER.finditer(text)]

    def far(at: int) -> bool:
        above = [header for start, header in headers if start < at]
        return not above or name not in above[-1]

    return sorted((match.end() for match in _ARRAY_OF_KEYS.finditer(text)), key=far)


def _inserted(text: str, at: int, value: str) -> str:
    """``text`` with ``value`` as the first item of the array that begins at ``at``."""
    rest = text[at:]
    if re.match(r"\s*\]", rest):
        return text[:at] + value + rest
    if indented := re.match(r"[ \t]*(\r?\n[ \t]*)(?=[\"'])", rest):
        return text[:at] + indented[1] + value + "," + rest
    return text[:at] + value + ", " + rest


def _quoted(value: str) -> str:
    """``value`` as a basic string of TOML."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04X}", escaped) + '"'


def _verified(text: str, wanted: dict[str, Any], path: Path) -> str:
    """``text`` if it says exactly ``wanted``.

    Raises:
        TenantsFileError: it does not, or it cannot be written as UTF-8.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise TenantsFileError(["the label holds lone surrogates; give valid Unicode"]) from None
    said = None
    with contextlib.suppress(TenantsFileError):
        said = load_toml(data, str(path))
    if said != wanted:
        raise TenantsFileError(
            [
                f"{path}: its layout leaves no room for a new tenant at the end; write tenants as "
                "[tenants.NAME] tables"
            ]
        )
    return text


def _rewrite(path: Path, edit: Callable[[str, dict[str, Any]], str], *, create: bool) -> None:
    """Replace the file at ``path`` by what ``edit`` makes of it, whole or not at all.

    A new file is 0600; an old one keeps its mode and owner, and where ``path`` is a link it is the
    file behind it that changes. Two commands at once wait for each other.
    """
    real = Path(os.path.realpath(path))
    try:
        with _locked(real.parent):
            data, status = b"", None
            if real.exists() or not create:
                data, status = real.read_bytes(), real.stat()
            parse_tenants(data, str(path))
            text = edit(data.decode(), load_toml(data, str(path)))
            _replace(real, text.encode(), status)
    except OSError as error:
        raise TenantsFileError(
            [f"{path}: cannot be changed ({error.strerror}); check the path and its permissions"]
        ) from None


def _replace(path: Path, data: bytes, old: os.stat_result | None) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            if old is not None:
                os.fchmod(file.fileno(), old.st_mode & 0o7777)
                made = os.fstat(file.fileno())
                if (made.st_uid, made.st_gid) != (old.st_uid, old.st_gid):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``directory`` itself, which leaves no lock file behind."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
