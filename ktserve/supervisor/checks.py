"""What keeps a server of given settings from starting, as far as can be told without its model."""

from __future__ import annotations

import ssl

from ktserve import runtime_dir
from ktserve.config import Settings
from ktserve.ipc import AddressTooLong, engine_address, new_boot_id
from ktserve.tenancy.tenants import load_tenants
from ktserve.tenancy.tenants_file import TenantsFileError


class CannotStart(ValueError):
    """A file that the settings name cannot be used.

    Attributes:
        problems: each names the setting or file, what is wrong and the remedy.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def check(settings: Settings) -> int:
    """Read what the server will read at its start; returns how many tenants there are.

    Raises:
        CannotStart: the file of tenants or the certificate cannot be used, or the runtime
            directory's path is too long.
    """
    try:
        tenants = len(load_tenants(settings))
        engine_address(runtime_dir.locate(settings), new_boot_id())
    except TenantsFileError as error:
        raise CannotStart(error.problems) from None
    except AddressTooLong as error:
        raise CannotStart([str(error)]) from None
    if settings.ssl_certfile is not None:
        _check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    return tenants


def _check_certificate(certfile: str, keyfile: str | None) -> None:
    try:
        # Nobody is asked for the passphrase of a key that has one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certfile, keyfile, password=lambda: ""
        )
    except (OSError, ssl.SSLError) as error:
        raise CannotStart(
            [
                f"--ssl-certfile or --ssl-keyfile cannot be used ({error}); "
                "give PEM files without a passphrase"
            ]
        ) from None
