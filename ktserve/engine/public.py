"""Public prefixes in the engine: registered, computed by a request of the engine's own, kept."""

from __future__ import annotations

import logging

from ktserve.cache.kept import CacheError
from ktserve.cache.kept import PublicPrefix as Registered
from ktserve.cache.manager import CacheManager
from ktserve.messages import PublicPrefix, Request, SamplingParams

log = logging.getLogger("ktserve.engine")


class PublicPrefixes:
    """Those that are being computed."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._computing: dict[int, Registered] = {}

    def register(self, message: PublicPrefix) -> Request | None:
        """Register a prefix; the request that computes it, if it is not there already.

        The request's id is below 0, where no client's is.
        """
        if not self._cache.enabled:
            log.warning("public prefix %s is not kept: --disable-radix-cache", message.name)
            return None
        try:
            prefix = self._cache.publish(message.name, message.tenants, message.prompt)
        except CacheError as error:
            log.error("%s", error)
            return None
        if prefix.lease is not None or -prefix.id in self._computing:
            return None
        request = Request(
            request_id=-prefix.id,
            namespace=prefix.namespace,
            prompt=prefix.tokens,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
        )
        self._computing[request.request_id] = prefix
        return request

    def computed(self, request_id: int) -> None:
        """Show the prefix to its readers: its request has ended well."""
        prefix = self._computing.pop(request_id)
        if self._cache.kept.public.get(prefix.name) is not prefix:
            return  # it was replaced meanwhile
        if not self._cache.hold(prefix):
            log.error("public prefix %s was computed and is not in the cache", prefix.name)
            self._withdraw(prefix)
        else:
            log.info(
                "public prefix %s: %d tokens are kept; tenants that read it: %d",
                prefix.name,
                prefix.pages * self._cache.page_size,
                len(prefix.readers),
            )

    def failed(self, request_id: int, problem: str) -> None:
        """Give the prefix up."""
        prefix = self._computing.pop(request_id)
        log.error("public prefix %s cannot be computed: %s", prefix.name, problem)
        self._withdraw(prefix)

    def forget(self) -> None:
        """Their requests were ended with all others; whoever registered them does it again."""
        for prefix in self._computing.values():
            self._withdraw(prefix)
        self._computing.clear()

    def _withdraw(self, prefix: Registered) -> None:
        # Under its name there may be a newer one by now.
        if self._cache.kept.public.get(prefix.name) is prefix:
            self._cache.withdraw(prefix.name)
