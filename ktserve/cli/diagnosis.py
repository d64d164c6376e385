"""What `ktserve doctor` looks at: each finding says what was found and what to do."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal, NamedTuple

from ktserve.config import Settings

State = Literal["good", "warning", "bad"]

_PROBE = """\
import torch
print(torch.__version__)
print(torch.cuda.is_available())
if torch.cuda.is_available():
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}|{major}.{minor}|{free}|{total}")
"""
_PROBE_SECONDS = 120
_LEAST_MEMORY = 2 * 2**30


class Finding(NamedTuple):
    """One line.

    Attributes:
        what: that was looked at.
        found: how it is.
        remedy: what to do; empty where nothing is.
    """

    state: State
    what: str
    found: str
    remedy: str = ""


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at this machine as a server of ``settings`` would find it, a finding at a time."""
    yield _python()
    yield from _packages()
    yield from _torch()
    yield _memory()
    yield _sockets(settings)
    yield _model(settings)


def _python() -> Finding:
    return Finding("good", "python", f"{platform.python_version()}, {sys.executable}")


def _packages() -> Iterator[Finding]:
    """What ktserve needs and what is there. Ranges are pip's to check: `pip check`."""
    missing = []
    for requirement in requires("ktserve") or []:
        if "extra ==" in requirement:
            continue
        name = _name_of(requirement)
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        remedy = "pip install " + " ".join(missing)
        yield Finding("bad", "packages", f"missing: {', '.join(missing)}", remedy)
    else:
        yield Finding("good", "packages", f"all there; transformers {version('transformers')}")


def _name_of(requirement: str) -> str:
    end = next(
        (at for at, letter in enumerate(requirement) if not (letter.isalnum() or letter in "-_.")),
        len(requirement),
    )
    return requirement[:end]


def _torch() -> Iterator[Finding]:
    """In a process of its own: torch is slow to load, and a broken one can end the process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding("bad", "torch", f"not loaded after {_PROBE_SECONDS} s", "install it anew")
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
        yield Finding("bad", "torch", f"cannot be loaded: {last}", "install it anew")
        return
    torch_version, cuda, *gpu = done.stdout.splitlines()
    yield Finding("good", "torch", torch_version)
    if cuda == "True":
        name, capability, free, total = gpu[0].split("|")
        memory = f"{int(free) / 2**30:.1f} of {int(total) / 2**30:.1f} GiB free"
        if float(capability) < 8.0:
            remedy = "use a GPU of compute capability 8.0 or newer, or --device cpu"
            yield Finding("bad", "device", f"{name}, compute capability {capability}", remedy)
        else:
            yield Finding("good", "device", f"{name} ({capability}), {memory}")
    elif shutil.which("nvidia-smi"):
        yield Finding(
            "warning",
            "device",
            "there is an NVIDIA driver, and torch sees no GPU",
            "install a torch built for CUDA, and look at CUDA_VISIBLE_DEVICES",
        )
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        yield Finding("good", "device", f"CPU, {cores} cores; no GPU")


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    found = f"{free / 2**30:.1f} GiB available"
    if free < _LEAST_MEMORY:
        remedy = "end other programs, or serve a smaller model; `ktserve run --dry-run` shows needs"
        return Finding("warning", "memory", found, remedy)
    return Finding("good", "memory", found)


def _sockets(settings: Settings) -> Finding:
    from ktserve.ipc import AddressTooLong, engine_address, new_boot_id
    from ktserve.runtime_dir import locate

    where = locate(settings)
    try:
        engine_address(where, new_boot_id())
    except AddressTooLong as error:
        return Finding("bad", "sockets", str(where), str(error))
    above = next(path for path in (where, *where.parents) if path.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        remedy = "choose another with --runtime-dir, or set XDG_RUNTIME_DIR"
        return Finding("bad", "sockets", f"{where}: no right to write in {above}", remedy)
    return Finding("good", "sockets", str(where))


def _model(settings: Settings) -> Finding:
    from ktserve.models.packaged import PackagedModelMissing
    from ktserve.models.source import ModelNotFound, locate

    try:
        source = locate(settings.model, settings.load_format, settings.cache_dir)
    except (PackagedModelMissing, ModelNotFound) as error:
        return Finding("bad", "model", "none", str(error))
    if source.directory is not None:
        return Finding("good", "model", f"{source.name} in {source.directory}")
    verb = "downloaded" if source.kind == "hub" else "converted"
    return Finding("good", "model", f"{source.name}; it is {verb} at the first start")
