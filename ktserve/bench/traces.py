"""Public traces of prompts, as the blocks of tokens that they are made of.

Two formats are read:

- Mooncake's (https://github.com/kvcache-ai/Mooncake): a file with one JSON object a line, whose
  ``hash_ids`` name the prompt's prefix blocks of 512 tokens.
- Agent sessions (https://github.com/callanjfox/kv-cache-tester): a directory with one JSON file a
  session, whose requests name blocks of 64 tokens by ids that hold inside the session alone.

In both, equal ids are equal blocks behind equal blocks. No trace names a tenant. What comes nearest
is a *root*: the session, or the first block behind those with which all prompts of the trace begin.
Requests of different roots have no block in common but that beginning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.uint64]

PAGE_TOKENS = 4
"""A block becomes one page of this many tokens: enough that no two blocks get the same ones."""

_MOONCAKE_BLOCK_TOKENS = 512
_MILLISECONDS = 1000

_Id = Annotated[int, msgspec.Meta(ge=0)]
_Time = Annotated[float, msgspec.Meta(ge=0)]


class TraceError(ValueError):
    """A trace cannot be read; the message names the place and what to do."""


@dataclass(frozen=True)
class TraceRequest:
    """One prompt.

    Attributes:
        at: seconds since the trace began, or since its own session began.
        root: the session, or the first block that tells conversations apart.
        blocks: ids of its blocks, unique in the trace.
    """

    at: float
    root: str
    blocks: BlockIds


@dataclass(frozen=True)
class Trace:
    """A trace.

    Attributes:
        name: of its file or directory.
        block_tokens: tokens that a block stood for where the trace was taken.
        own_clocks: every root's time begins at 0, so that the roots' order in time is not known.
        requests: each root's in order of time; where the clock is one, all of them.
    """

    name: str
    block_tokens: int
    own_clocks: bool
    requests: Sequence[TraceRequest]


class _Line(msgspec.Struct):
    timestamp: _Time
    hash_ids: list[_Id]


class _SessionRequest(msgspec.Struct):
    t: _Time
    hash_ids: list[_Id]


class _Session(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    hash_id_scope: Literal["local"]
    requests: list[_SessionRequest]


def read_trace(path: Path) -> Trace:
    """Read a Mooncake file, or a directory of agent sessions.

    Raises:
        TraceError: nothing is there, or it has neither format.
    """
    if path.is_dir():
        return _read_sessions(path)
    if path.is_file():
        return _read_mooncake(path)
    raise TraceError(
        f"{path} is not there; give a .jsonl file of Mooncake's or a directory of agent sessions"
    )


def page_tokens(blocks: BlockIds) -> bytes:
    """The packed tokens of ``blocks``, `PAGE_TOKENS` for each: a function of the ids alone."""
    high = _mix(blocks)
    words = np.stack((high, _mix(high)), axis=1).view("<u4")
    return (words & np.uint32(0x7FFF_FFFF)).astype("<i4").tobytes()


def _read_mooncake(path: Path) -> Trace:
    decoder = msgspec.json.Decoder(_Line)
    lines = []
    for number, text in enumerate(_read(path).splitlines(), 1):
        if not text.strip():
            continue
        try:
            lines.append(decoder.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(
                f"{path}, line {number}: {error}; a line is one JSON object with timestamp "
                "(milliseconds) and hash_ids (whole numbers)"
            ) from None
    if not lines:
        raise TraceError(f"{path} has no requests; a Mooncake file has a JSON object on each line")
    lines.sort(key=lambda line: line.timestamp)
    shared = _common_beginning([line.hash_ids for line in lines])
    requests = [
        TraceRequest(
            at=line.timestamp / _MILLISECONDS,
            root=str(line.hash_ids[shared]) if len(line.hash_ids) > shared else "",
            blocks=_ids(line.hash_ids, path),
        )
        for line in lines
    ]
    return Trace(path.name, _MOONCAKE_BLOCK_TOKENS, own_clocks=False, requests=requests)


def _read_sessions(directory: Path) -> Trace:
    decoder = msgspec.json.Decoder(_Session)
    files = sorted(directory.glob("*.json"))
    if not files:
        raise TraceError(f"{directory} has no .json file; a directory of sessions has one for each")
    seen: dict[str, Path] = {}
    sizes: dict[int, Path] = {}
    requests = []
    for file in files:
        try:
            session = decoder.decode(_read(file))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(
                f"{file}: {error}; a session is one JSON object with id, block_size, "
                "hash_id_scope (local) and requests, each with t (seconds) and hash_ids"
            ) from None
        if session.id in seen:
            raise TraceError(f"{file} has the id of {seen[session.id].name}; take one of them away")
        seen[session.id] = file
        sizes.setdefault(session.block_size, file)
        if len(sizes) > 1:
            raise TraceError(
                f"{file} has blocks of {session.block_size} tokens, {files[0].name} of "
                f"{next(iter(sizes))}; replay them from directories of their own"
            )
        # Ids are local to the session, so they are moved apart by a number of its own.
        apart = np.frombuffer(hashlib.blake2b(session.id.encode(), digest_size=8).digest(), "<u8")
        for request in sorted(session.requests, key=lambda request: request.t):
            blocks = _mix(_ids(request.hash_ids, file) + apart)
            requests.append(TraceRequest(request.t, session.id, blocks))
    if not requests:
        raise TraceError(
            f"the sessions in {directory} have no requests; there is nothing to replay"
        )
    return Trace(directory.name, next(iter(sizes)), own_clocks=True, requests=requests)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read: {error.strerror}; check its permissions"
        ) from None


def _ids(ids: list[int], path: Path) -> BlockIds:
    try:
        return np.array(ids, dtype=np.uint64)
    except OverflowError:
        raise TraceError(
            f"{path}: the block id {max(ids)} is too great; ids are below 2^64"
        ) from None


def _common_beginning(prompts: list[list[int]]) -> int:
    """How many blocks all ``prompts`` begin with alike."""
    first, last = min(prompts), max(prompts)
    alike = 0
    while alike < min(len(first), len(last)) and first[alike] == last[alike]:
        alike += 1
    return alike


def _mix(numbers: BlockIds) -> BlockIds:
    """SplitMix64's output function (Steele et al., 2014): one-to-one, and looks random."""
    mixed = numbers + np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ (mixed >> np.uint64(31))
