"""`supervise` over the fake children, as a process that tests can signal and kill.

Arguments: the settings, the mode of `fake_engine`, that of `fake_api`; the first as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ktserve.config import Settings
from ktserve.supervisor import supervise
from ktserve.supervisor.restarts import RestartRules

FAKES = Path(__file__).parent

if __name__ == "__main__":
    sys.exit(
        supervise(
            Settings(**json.loads(sys.argv[1])),
            commands={
                "engine": (sys.executable, str(FAKES / "fake_engine.py"), sys.argv[2]),
                "api": (sys.executable, str(FAKES / "fake_api.py"), sys.argv[3]),
            },
            restarts=RestartRules(first_delay=0.01, longest_delay=0.02, unready_deaths=3),
        )
    )
