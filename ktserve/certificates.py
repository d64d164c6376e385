"""Whether a TLS certificate and its key can be used."""

from __future__ import annotations

import ssl


def problem_of(certfile: str, keyfile: str | None) -> str | None:
    """Why PEM files cannot be used, with the settings' names and the remedy; None: they can be.

    A key with a passphrase is a problem, too: nobody is asked for it.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        return (
            f"--ssl-certfile or --ssl-keyfile cannot be used ({error}); "
            "give PEM files without a passphrase"
        )
    return None
