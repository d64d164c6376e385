"""What the routes of one server share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ktserve import __version__
from ktserve.api.errors import ApiError, shown
from ktserve.api.generation import Engine
from ktserve.api.limits import Admissions
from ktserve.api.metrics import Metrics
from ktserve.api.tokenization import Tokenization
from ktserve.config import Settings
from ktserve.messages import EngineInfo
from ktserve.tenancy.tenants import Tenants

STARTING_RETRY_S = 5


@dataclass(frozen=True)
class Service:
    """One server's parts, handed to every route.

    Attributes:
        model: the name by which clients call the model.
        pseudonym_key: under which namespaces are named in logs; a secret.
        created: when the server started, in seconds since 1970.
        clock: seconds that only grow, for latencies.
    """

    settings: Settings
    engine: Engine
    tokenization: Tokenization
    tenants: Tenants
    model: str
    pseudonym_key: bytes = field(repr=False)
    admissions: Admissions
    metrics: Metrics
    created: int
    clock: Callable[[], float] = time.monotonic

    def ready_info(self) -> EngineInfo:
        """What the engine says of itself.

        Raises:
            ApiError: 503, there is no engine that could serve.
        """
        info = self.engine.info
        if info is None:
            raise ApiError(
                503,
                "the engine is not ready: it is starting, or starting again; try again",
                code="engine_unavailable",
                retry_after=STARTING_RETRY_S,
            )
        return info

    def check_model(self, name: str | None) -> None:
        """Raise the 404 unless ``name`` is the served model's, or absent."""
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"the model '{shown(name)}' does not exist; this server has '{shown(self.model)}'",
                code="model_not_found",
                param="model",
            )

    def fingerprint(self, info: EngineInfo) -> str:
        """A word that changes when the same seed may give another text."""
        parts = (
            __version__,
            info.architecture,
            self.model,
            info.dtype,
            info.device,
            info.attention_backend,
        )
        return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
