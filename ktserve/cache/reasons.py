"""Why a request found in the cache what it found."""

from __future__ import annotations

from typing import Literal

import msgspec

By = Literal["own", "other", "system"]


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much a lookup found and why not more. For the operator: ``by`` speaks of other tenants.

    Attributes:
        kind: ``hit``: all that was ever known of the prompt was there. ``diverged``: what is cached
            begins so and goes on differently. ``evicted``: more was there and was given up.
            ``cold``: nothing that begins so is known. ``below_page``: the prompt is too short to
            fill a page beside its last token. ``opted_out``: the request asked not to be looked up.
            ``disabled``: the server keeps no prefixes.
        tokens: that were found, whatever the kind.
        at: of ``diverged`` the first token that differs, of ``evicted`` the first that is missing.
        seconds: since the eviction.
        by: for whom it was evicted: a request of the same tenant, of another one, or nobody (a
            flush, a time to live, a limit).
    """

    kind: Literal["hit", "cold", "below_page", "diverged", "evicted", "opted_out", "disabled"]
    tokens: int = 0
    at: int | None = None
    seconds: float | None = None
    by: By | None = None

    def __str__(self) -> str:
        found = f", {self.tokens} tokens before it found" if self.tokens else ""
        match self.kind:
            case "hit":
                return f"hit {self.tokens} tokens"
            case "diverged":
                return f"diverged at token {self.at}{found}"
            case "evicted":
                by = {"own": "the tenant itself", "other": "another tenant", "system": "the system"}
                whom = by[self.by or "system"]
                return f"evicted {self.seconds:.1f} s ago by {whom} at token {self.at}{found}"
            case "below_page":
                return "below a page"
            case "opted_out":
                return "opted out"
            case _:
                return self.kind
