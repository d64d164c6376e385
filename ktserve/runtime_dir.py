"""Where a server keeps its sockets: a directory of its own that nobody else may enter.

Everything that reaches the server from the machine itself (messages between its processes, the
admin plane) goes through this directory, so its owner and mode are the access control.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from ktserve.config import Settings
from ktserve.ipc import AddressTooLong, engine_address, new_boot_id

_LOCK_FILE = "lock"
_PRIVATE = 0o700


class RuntimeDirError(Exception):
    """The runtime directory cannot be used. The message names the flag and the remedy."""


def locate(settings: Settings) -> Path:
    """The absolute path of the runtime directory, whether or not it exists.

    ``--runtime-dir`` as it is; else, for a server named NAME: ``/run/ktserve/NAME`` for root where
    there is a ``/run``, ``$XDG_RUNTIME_DIR/ktserve/NAME`` where that is set, or
    ``ktserve-<uid>/NAME`` in the directory for temporary files.
    """
    if settings.runtime_dir is not None:
        return Path(settings.runtime_dir).absolute()
    return _default_base() / settings.name


def _default_base() -> Path:
    user = os.geteuid()
    if user == 0 and os.path.isdir("/run"):
        return Path("/run/ktserve")
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.path.isabs(session):
        return Path(session, "ktserve")
    return Path(tempfile.gettempdir(), f"ktserve-{user}").absolute()


class RuntimeDir:
    """The runtime directory of one running server, held against any other until `close`.

    Attributes:
        path: absolute; mode 0700, owned by this process's user.

    Raises:
        RuntimeDirError: it cannot be created, is not private, is in use, or its path is too long
            for a socket.
    """

    def __init__(self, settings: Settings) -> None:
        self.path = locate(settings)
        try:
            engine_address(self.path, new_boot_id())
        except AddressTooLong as error:
            raise RuntimeDirError(str(error)) from None
        try:
            if settings.runtime_dir is None:
                # Below the directory for temporary files anyone could have made this one first.
                _make_private(self.path.parent)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            _make_private(self.path)
            self._lock = _lock(self.path, settings.name)
        except OSError as error:
            raise RuntimeDirError(
                f"the runtime directory {self.path} cannot be used: {error.strerror}; choose "
                "another with --runtime-dir"
            ) from None
        self._remove_sockets("*")

    def remove_engine_sockets(self) -> None:
        """Remove what a dead engine left; only while no engine lives."""
        self._remove_sockets("engine-*.ipc")

    def close(self) -> None:
        """Remove the sockets and let another server have the directory. Idempotent."""
        if self._lock >= 0:
            self._remove_sockets("*")
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RuntimeDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _remove_sockets(self, pattern: str) -> None:
        for entry in self.path.glob(pattern):
            if entry.is_socket():
                entry.unlink(missing_ok=True)


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=_PRIVATE)
    except FileExistsError:
        pass
    else:
        # The umask may have taken bits away.
        path.chmod(_PRIVATE)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise RuntimeDirError(
            f"the runtime directory {path} is not a directory (a link is not followed); remove it "
            "or choose another with --runtime-dir"
        )
    if found.st_uid != os.geteuid():
        raise RuntimeDirError(
            f"the runtime directory {path} belongs to user {found.st_uid}, not to user "
            f"{os.geteuid()} who runs this; choose another with --runtime-dir"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise RuntimeDirError(
            f"the runtime directory {path} is open to other users (mode "
            f"{stat.S_IMODE(found.st_mode):04o}, it must be 0700); run chmod 700 on it or choose "
            "another with --runtime-dir"
        )


def _lock(directory: Path, name: str) -> int:
    """A descriptor that holds the directory's lock; the kernel drops it however the holder ends.

    It is not inherited by children, so it lasts exactly as long as the supervisor.
    """
    descriptor = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise RuntimeDirError(
            f"a server named {name} already runs (process {holder}, directory {directory}); stop "
            "it or give this one another --name (and --runtime-dir, if that is set)"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
