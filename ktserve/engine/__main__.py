"""``python -m ktserve.engine``: started by the supervisor, with its configuration on stdin."""

from __future__ import annotations

import logging
import signal
import sys

from ktserve.ipc import BlockingSupervisorLink, exit_with_supervisor, read_child_config
from ktserve.logs import configure


def main() -> int:
    """Run the engine process; returns its exit code."""
    config = read_child_config(sys.stdin.buffer)
    exit_with_supervisor(sys.stdin.buffer)
    # Ctrl-C in a terminal reaches the supervisor, which drains first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure(config.settings.log_level, config.settings.log_format, process="engine")
    link = BlockingSupervisorLink(config.runtime_dir, "engine")
    # Slow to import: the supervisor's link and lifeline come first.
    from ktserve.engine.process import serve, start

    try:
        started = start(config.settings, config.pseudonym_key, config.roster)
    except (ValueError, OSError) as error:
        logging.getLogger("ktserve.engine").debug("start failed", exc_info=True)
        link.fail(str(error))
        return 1
    serve(started, config.runtime_dir, link)
    link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
