"""What keeps a server of given settings from starting, as far as can be told without its model."""

from __future__ import annotations

from ktserve import certificates, runtime_dir
from ktserve.config import Settings
from ktserve.ipc import AddressTooLong, engine_address, new_boot_id
from ktserve.tenancy.tenants import Roster, load_roster
from ktserve.tenancy.tenants_file import TenantsFileError


class CannotStart(ValueError):
    """A file that the settings name cannot be used.

    Attributes:
        problems: each names the setting or file, what is wrong and the remedy.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def check(settings: Settings) -> Roster:
    """Read what the server will read at its start; returns its tenants.

    Raises:
        CannotStart: the file of tenants or the certificate cannot be used, or the runtime
            directory's path is too long.
    """
    try:
        roster = load_roster(settings)
        engine_address(runtime_dir.locate(settings), new_boot_id())
    except TenantsFileError as error:
        raise CannotStart(error.problems) from None
    except AddressTooLong as error:
        raise CannotStart([str(error)]) from None
    if settings.ssl_certfile is not None:
        problem = certificates.problem_of(settings.ssl_certfile, settings.ssl_keyfile)
        if problem is not None:
            raise CannotStart([problem])
    return roster
