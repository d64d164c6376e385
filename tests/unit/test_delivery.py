"""A namespace cannot be dropped on its way: not by a forgotten argument, a patched constructor or a
message without it. The bug that ktserve exists for was one forgotten keyword."""

from __future__ import annotations

import os
import shutil
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

# The product's own lines on which a namespace travels, what forgetting it makes of them, and what
# the type checker says to that.
MUTATIONS = [
    (
        "api/namespaces.py",
        "cache_salt=salt,",
        "",
        'Missing named argument "cache_salt" for "Namespace"',
    ),
    (
        "api/namespaces.py",
        "extra_key=key,",
        "",
        'Missing named argument "extra_key" for "Namespace"',
    ),
    (
        "api/planning.py",
        "namespace=prompt.namespace,",
        "",
        'Missing named argument "namespace" for "Request"',
    ),
    (
        "engine/public.py",
        "namespace=prefix.namespace,",
        "",
        'Missing named argument "namespace" for "Request"',
    ),
    (
        "engine/scheduler.py",
        "cache.peek(sequence.request.namespace, bytes(sequence.tokens))",
        "cache.peek(bytes(sequence.tokens))",
        'Missing positional argument "prompt" in call to "peek"',
    ),
    (
        "engine/scheduler.py",
        "request.namespace,\n            bytes(sequence.tokens),",
        "bytes(sequence.tokens),",
        'Missing positional argument "prompt" in call to "open"',
    ),
    (
        "cache/manager.py",
        "self.forest.match(\n            namespace,\n            prompt,",
        "self.forest.match(\n            prompt,",
        'Argument 1 to "match" of "RadixForest" has incompatible type "bytes"',
    ),
    (
        "cache/manager.py",
        "BlockTable(\n            namespace, tree.account,",
        "BlockTable(\n            tree.account,",
        'Argument 1 to "BlockTable" has incompatible type "Account"',
    ),
]


def type_errors(package: Path) -> str:
    """What strict mypy says of the files that the mutations touch, in a copy of the package."""
    files = sorted({str(package / file) for file, *_ in MUTATIONS})
    result = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty"),
            # The cache of `make types` knows the libraries already.
            *("--config-file", str(REPOSITORY / "pyproject.toml")),
            *("--cache-dir", str(REPOSITORY / ".mypy_cache"), *files),
        ],
        cwd=package.parent,
        env=os.environ | {"MYPYPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not result.stderr, result.stderr
    return result.stdout


def test_every_omission_in_the_product_is_a_type_error(tmp_path):
    package = tmp_path / "ktserve"
    for room, target in (("ktserve", package), ("kernels", package / "kernels")):
        shutil.copytree(REPOSITORY / room, target, ignore=shutil.ignore_patterns("__pycache__"))
    assert type_errors(package) == ""
    for file, old, new, _ in MUTATIONS:
        text = (package / file).read_text()
        assert text.count(old) == 1, f"{file} no longer has {old!r} once: name its successor here"
        (package / file).write_text(text.replace(old, new))
    found = type_errors(package)
    for file, _, _, complaint in MUTATIONS:
        assert any(file in line and complaint in line for line in found.splitlines()), found


@pytest.mark.parametrize("field", ["tenant", "cache_salt", "extra_key", "adapter"])
def test_a_namespace_without_a_field_is_none(field):
    fields = {name: getattr(NAMESPACE, name) for name in NAMESPACE.__struct_fields__}
    assert Namespace(**fields) == NAMESPACE
    del fields[field]
    with pytest.raises(TypeError, match=f"required argument '{field}'"):
        Namespace(**fields)


def test_a_request_without_a_namespace_is_none():
    fields = {name: getattr(REQUEST, name) for name in REQUEST.__struct_fields__}
    assert Request(**fields) == REQUEST
    del fields["namespace"]
    with pytest.raises(TypeError, match="required argument 'namespace'"):
        Request(**fields)


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
