"""A namespace cannot be dropped on its way: not by a forgotten argument, a patched constructor or a
message without it. The bug that ktserve exists for was one forgotten keyword."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ktserve.engine.sequence import Sequence
from ktserve.messages import Request, SamplingParams, ToEngine
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import pack

REPOSITORY = Path(__file__).resolve().parents[2]
NAMESPACE = Namespace(tenant="t", cache_salt="s", extra_key=None, adapter=None)
REQUEST = Request(
    request_id=1, namespace=NAMESPACE, prompt=pack([1]), sampling=SamplingParams(max_tokens=1)
)

COMPLETE = """
from ktserve.messages import Request, SamplingParams
from ktserve.tenancy.namespace import Namespace

namespace = Namespace(tenant="t", cache_salt=None, extra_key=None, adapter=None)
Request(request_id=1, namespace=namespace, prompt=b"1234", sampling=SamplingParams(max_tokens=1))
"""
MUTATIONS = {
    "the request's namespace": ("namespace=namespace, ", ""),
    "the salt": ("cache_salt=None, ", ""),
    "the extra key": ("extra_key=None, ", ""),
    "the adapter": (", adapter=None", ""),
    "the tenant": ('tenant="t", ', ""),
}


def type_errors(tmp_path: Path, sources: dict[str, str]) -> dict[str, list[str]]:
    """The errors that strict mypy finds in each source."""
    subprocess.run([sys.executable, "scripts/link_tree.py"], cwd=REPOSITORY, check=True)
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--no-error-summary"),
            *("--config-file=", "--follow-imports=silent"),
            *("--cache-dir", str(tmp_path / "cache"), *sources),
        ],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(REPOSITORY / "build" / "linked")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not result.stderr, result.stderr
    lines = [line for line in result.stdout.splitlines() if ": error: " in line]
    return {name: [line for line in lines if line.startswith(name)] for name in sources}


def test_every_omission_is_a_type_error(tmp_path):
    sources = {"complete.py": COMPLETE}
    for number, (old, new) in enumerate(MUTATIONS.values()):
        assert old in COMPLETE
        sources[f"mutation_{number}.py"] = COMPLETE.replace(old, new, 1)
    found = type_errors(tmp_path, sources)
    assert found.pop("complete.py") == []
    assert all(found.values()), found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_every_omission_fails_when_it_runs(mutation):
    old, new = MUTATIONS[mutation]
    exec(COMPLETE, {})
    with pytest.raises(TypeError, match="required"):
        exec(COMPLETE.replace(old, new, 1), {})


def test_a_message_without_its_namespace_is_not_a_request():
    whole = msgspec.msgpack.encode(REQUEST)
    assert msgspec.msgpack.decode(whole, type=ToEngine) == REQUEST
    body = msgspec.msgpack.decode(whole)
    del body["namespace"]
    with pytest.raises(msgspec.ValidationError, match="namespace"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=ToEngine)


@pytest.mark.parametrize("fields", [1, 3, 5])
def test_a_namespace_of_another_width_is_none(fields):
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(REQUEST))
    body["namespace"] = [*body["namespace"], None][:fields]
    with pytest.raises(msgspec.ValidationError, match="namespace"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=ToEngine)


def test_the_engine_holds_the_request_itself():
    sequence = Sequence(REQUEST, seed=1, arrival=0.0)
    assert sequence.request is REQUEST
    assert not hasattr(sequence, "namespace")
