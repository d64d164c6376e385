from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ktserve.config import Settings
from ktserve.runtime_dir import RuntimeDir, RuntimeDirError, locate


def settings(path: Path, name: str = "default") -> Settings:
    return Settings(runtime_dir=str(path), name=name)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes this process look like an ordinary user's, whose files are still its own."""
    user = os.geteuid()
    if user == 0:
        monkeypatch.setattr("os.path.isdir", lambda _path: False)
    return user


def test_is_private_whatever_the_umask(socket_dir: Path) -> None:
    umask = os.umask(0o777)
    try:
        with RuntimeDir(settings(socket_dir / "run")) as directory:
            assert mode(directory.path) == 0o700
    finally:
        os.umask(umask)


def test_parents_of_a_given_directory_are_made(socket_dir: Path) -> None:
    with RuntimeDir(settings(socket_dir / "a" / "b")) as directory:
        assert directory.path == socket_dir / "a" / "b"


def test_default_is_in_the_session_directory(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, as_user: int
) -> None:
    assert as_user == os.geteuid()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    with RuntimeDir(Settings(name="one")) as directory:
        assert directory.path == socket_dir / "ktserve" / "one"
        assert mode(socket_dir / "ktserve") == 0o700


def test_default_without_a_session_is_below_the_temporary_directory(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, as_user: int
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(socket_dir))
    assert locate(Settings()) == socket_dir / f"ktserve-{as_user}" / "default"


def test_second_server_is_told_to_take_another_name(socket_dir: Path) -> None:
    with RuntimeDir(settings(socket_dir / "run")):
        with pytest.raises(RuntimeDirError, match=rf"process {os.getpid()}.*--name"):
            RuntimeDir(settings(socket_dir / "run"))
        with RuntimeDir(settings(socket_dir / "other", name="other")):
            pass


def test_closed_directory_can_be_taken_again(socket_dir: Path) -> None:
    directory = RuntimeDir(settings(socket_dir / "run"))
    directory.close()
    directory.close()
    RuntimeDir(settings(socket_dir / "run")).close()


def test_what_a_crash_left_is_removed_and_reused(socket_dir: Path) -> None:
    path = socket_dir / "run"
    script = (
        "import os, socket, sys\n"
        "from ktserve.config import Settings\n"
        "from ktserve.runtime_dir import RuntimeDir\n"
        "held = RuntimeDir(Settings(runtime_dir=sys.argv[1]))\n"
        "socket.socket(socket.AF_UNIX).bind(sys.argv[1] + '/engine-0.ipc')\n"
        "os._exit(9)\n"
    )
    crashed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert crashed.returncode == 9
    (path / "kept.txt").write_text("not a socket")
    assert (path / "engine-0.ipc").is_socket()
    with RuntimeDir(settings(path)):
        assert not (path / "engine-0.ipc").exists()
        assert (path / "kept.txt").exists()


def test_only_the_engines_sockets_are_removed_between_its_lives(socket_dir: Path) -> None:
    with RuntimeDir(settings(socket_dir / "run")) as directory:
        for name in ("engine-0.ipc", "supervisor.ipc"):
            socket.socket(socket.AF_UNIX).bind(str(directory.path / name))
        directory.remove_engine_sockets()
        assert [entry.name for entry in directory.path.iterdir() if entry.is_socket()] == [
            "supervisor.ipc"
        ]
    assert not (directory.path / "supervisor.ipc").exists()


def test_too_long_path_is_refused_before_anything_is_made(socket_dir: Path) -> None:
    long = socket_dir / ("d" * 100)
    with pytest.raises(RuntimeDirError, match="limit is 99; choose a shorter --runtime-dir"):
        RuntimeDir(settings(long))
    assert not long.exists()


def test_open_directory_is_refused_and_left_as_it_was(socket_dir: Path) -> None:
    (socket_dir / "run").mkdir(mode=0o755)
    with pytest.raises(RuntimeDirError, match=r"mode 0755.*chmod 700"):
        RuntimeDir(settings(socket_dir / "run"))
    assert mode(socket_dir / "run") == 0o755


def test_link_is_not_followed(socket_dir: Path) -> None:
    (socket_dir / "target").mkdir(mode=0o700)
    (socket_dir / "run").symlink_to(socket_dir / "target")
    with pytest.raises(RuntimeDirError, match="link is not followed"):
        RuntimeDir(settings(socket_dir / "run"))


def test_directory_of_another_user_is_refused(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (socket_dir / "run").mkdir(mode=0o700)
    user = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: user + 1)
    with pytest.raises(RuntimeDirError, match=f"belongs to user {user}.*--runtime-dir"):
        RuntimeDir(settings(socket_dir / "run"))


def test_unusable_place_names_the_flag(socket_dir: Path) -> None:
    (socket_dir / "file").write_text("")
    with pytest.raises(RuntimeDirError, match="--runtime-dir"):
        RuntimeDir(settings(socket_dir / "file" / "run"))
