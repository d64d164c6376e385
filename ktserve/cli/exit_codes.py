"""What the exit status of every command means. Scripts rely on it: a code never changes meaning."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The status with which a command ends."""

    GOOD = 0
    CHECK_FAILED = 1
    """The command did its work and the answer is no."""
    USAGE = 2
    """A flag, variable or file of settings is wrong."""
    CANNOT_CONNECT = 3
    INCONCLUSIVE = 4
    """The check ran and could not tell."""
    PROTOCOL_MISMATCH = 5
    """The other side speaks another version, or no known protocol."""
    TARGET_UNHEALTHY = 6
    """The server under test became unhealthy on the way."""
    INTERNAL = 70
    """A fault of ktserve itself; please report it."""
