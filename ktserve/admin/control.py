"""What the admin sockets can have done, whoever does it: the supervisor, or a stand-in in tests."""

from __future__ import annotations

from typing import Protocol

from ktserve.admin.schemas import QuotaBody, Reloaded


class Refusal(Exception):
    """A change, or a question to a child, that came to nothing.

    Attributes:
        status: the HTTP status that says so.
        code: as in `ktserve.admin.schemas.Problem`.
        field: of the body, where one is at fault.
    """

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field


class Control(Protocol):
    """The running server, as its operators may change it. Every method raises `Refusal`.

    Attributes:
        admission: ``open``, ``paused`` or ``draining``.
        log_level: of all processes.
    """

    @property
    def admission(self) -> str: ...

    @property
    def log_level(self) -> str: ...

    async def flush(self, namespaces: tuple[int, ...] | None) -> int:
        """Forget what no lease covers, of trees by their index or of all; tokens freed."""

    async def set_quota(self, tenant: str, change: QuotaBody) -> None:
        """Change one tenant's quota until the file is read again or the server ends."""

    async def pin(self, namespace: int, nodes: tuple[int, ...]) -> tuple[int, int]:
        """Pin the prefix along ``nodes``, from the root; the pin's id and its tokens."""

    async def unpin(self, pin: int) -> None:
        """Let a pinned prefix go."""

    async def victims(self, tenant: str, most: int) -> list[tuple[int, int, int]]:
        """(node, namespace's index, tokens) in the order in which they would go."""

    async def elsewhere(self, request_id: int) -> list[tuple[int, int]] | None:
        """(namespace's index, tokens held) of the same tenant; None where it does not live."""

    async def reveal(self, namespace: int, nodes: tuple[int, ...], most: int) -> tuple[str, int]:
        """The text of a node's first tokens, and how many they are."""

    async def reload_tenants(self) -> Reloaded:
        """Read the file of tenants again; all of it, or nothing where it has a problem."""

    async def set_admission(self, *, paused: bool) -> None:
        """Refuse new requests, or let them in again."""

    def drain(self) -> None:
        """End the server, as SIGTERM does."""

    async def set_log_level(self, level: str) -> None:
        """Of all three processes."""
