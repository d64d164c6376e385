"""The process that starts, watches and restarts the engine and the API, and survives both."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence

from ktserve import logs
from ktserve.cli.exit_codes import ExitCode
from ktserve.config import Settings
from ktserve.ipc import Role
from ktserve.runtime_dir import RuntimeDir, RuntimeDirError
from ktserve.supervisor.checks import CannotStart, check
from ktserve.supervisor.restarts import RestartRules
from ktserve.supervisor.supervision import Supervisor

COMMANDS: Mapping[Role, Sequence[str]] = {
    # -P: the children import what this process imports, not what lies in the working directory.
    "engine": (sys.executable, "-P", "-m", "ktserve.engine"),
    "api": (sys.executable, "-P", "-m", "ktserve.api"),
}
"""How each child is started."""

log = logging.getLogger(__name__)


def supervise(
    settings: Settings,
    *,
    commands: Mapping[Role, Sequence[str]] = COMMANDS,
    restarts: RestartRules | None = None,
) -> int:
    """Run the server until it is told to stop or cannot go on; blocks.

    Call it in the main thread: it takes SIGTERM, SIGINT and SIGHUP.

    Returns:
        The exit status: 0 after a clean drain; 1 when requests were cut off, because the drain
        took too long or a second signal came; 2 when a setting is wrong, by what is found here or
        by what a child says; 70 when a child died again and again before it was ready.
    """
    logs.configure(settings.log_level, settings.log_format, process="supervisor")
    try:
        roster = check(settings)
        with RuntimeDir(settings) as runtime_dir:
            supervisor = Supervisor(
                settings, runtime_dir, roster, commands, restarts or RestartRules(), sys.stdout
            )
            return asyncio.run(supervisor.run())
    except CannotStart as error:
        for problem in error.problems:
            log.error("%s", problem)
    except RuntimeDirError as error:
        log.error("%s", error)
    return ExitCode.USAGE
