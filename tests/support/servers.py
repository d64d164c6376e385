"""Real servers: ``ktserve run`` in processes of their own, on loopback."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import httpx

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / "build" / "test-cache"
START_SECONDS = 120

KEYS = {"alpha": "kts-alpha-test-key", "alpha-2": "kts-alpha-second-key", "beta": "kts-beta-key"}
TENANTS = f"""
[tenants.alpha]
label = "Alpha"
keys = ["sha256:{hashlib.sha256(KEYS["alpha"].encode()).hexdigest()}",
        "sha256:{hashlib.sha256(KEYS["alpha-2"].encode()).hexdigest()}"]

[tenants.beta]
keys = ["sha256:{hashlib.sha256(KEYS["beta"].encode()).hexdigest()}"]
"""


class Server:
    """A running ``ktserve run``.

    Attributes:
        url: without ``/v1``.
    """

    def __init__(self, *arguments: str) -> None:
        # Short, because a Unix socket's path must be.
        self._directory = tempfile.mkdtemp(prefix="kt-")
        self._log: IO[bytes] = open(os.path.join(self._directory, "log"), "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ktserve", "run", "--port", "0"),
                *("--runtime-dir", self._directory, "--cache-dir", str(CACHE)),
                *arguments,
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=self._directory,
        )
        self.url = ""

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_ready(self) -> Server:
        found: list[str] = []
        self.wait(lambda: found.extend(re.findall(r"URL: (\S+)/v1", self.log())) or bool(found))
        self.url = found[0]
        return self

    def wait(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended: {self.process.returncode}\n{self.log()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not after {seconds} s\n{self.log()[-4000:]}")
            time.sleep(0.05)

    def child(self, role: str) -> int:
        """The process id of the engine or the api."""
        listing = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        lines = (line.split() for line in listing.splitlines())
        return next(int(pid) for pid, *args in lines if f"ktserve.{role}" in args)

    def metric(self, name: str) -> float:
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        raise AssertionError(f"no metric {name}")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        return self.process.returncode
