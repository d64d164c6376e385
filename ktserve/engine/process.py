"""The engine process: sockets on one side, the engine on the other."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
import zmq

from ktserve.attention import KVStorage, create_backend
from ktserve.config import Settings
from ktserve.engine.caching import build_cache, shares_in_tokens
from ktserve.engine.engine import Engine
from ktserve.engine.limits import scheduler_limits
from ktserve.engine.runner import ModelRunner
from ktserve.engine.sampler import Sampler
from ktserve.engine.scheduler import Scheduler
from ktserve.engine.steplog import StepLog
from ktserve.ipc import (
    BlockingSupervisorLink,
    configure_socket,
    engine_address,
    new_boot_id,
)
from ktserve.messages import EngineInfo, EngineReady, Stop, ToEngine
from ktserve.models import cpu_linear, loading, memory
from ktserve.models.source import ModelSource, locate, resolve
from ktserve.tenancy.tenants import Roster

log = logging.getLogger("ktserve.engine")


class StartedEngine(NamedTuple):
    """An engine that is ready to serve.

    Attributes:
        info: what the API process needs to know of it.
    """

    engine: Engine
    info: EngineInfo


def start(settings: Settings, pseudonym_key: bytes, roster: Roster) -> StartedEngine:
    """Load the model and lay out the memory.

    Raises:
        ValueError: a setting or the model cannot be served; the message says what to change.
        OSError: a file cannot be read or written.
    """
    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    began = time.monotonic()
    source = _source(settings)
    config = loading.read_config(loading.directory_of(source))
    device = loading.choose_device(settings.device)
    dtype = loading.choose_dtype(settings.dtype, config, device)
    packing = cpu_linear.choose(settings.cpu_weights, dtype, device)
    plan = memory.plan_pool(
        config,
        settings,
        device=device,
        dtype=dtype,
        packing=packing,
        weight_bytes=memory.count_weight_bytes(config, dtype, packing),
        available_bytes=memory.available_bytes(device),
    )
    cache = build_cache(settings, plan.pages, roster)
    loaded = loading.load(
        source, dtype=dtype, device=device, seed=settings.random_seed or 0, packing=packing
    )
    precision = cpu_linear.precision(dtype, packing, len(loaded.unpacked))
    kv_heads, head_dim = memory.kv_shape(config)
    storage = KVStorage(
        layers=config.num_hidden_layers,
        pages=plan.pages,
        page_size=plan.page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    backend = create_backend(settings.attention_backend)
    vocab_size: int = config.vocab_size
    engine = Engine(
        scheduler=Scheduler(cache, scheduler_limits(settings, plan.context_length, device.type)),
        cache=cache,
        runner=ModelRunner(loaded, storage, backend, device),
        sampler=Sampler(loaded.eos_token_ids, vocab_size),
        eos_token_ids=loaded.eos_token_ids,
        steplog=StepLog(pseudonym_key),
        draw_seed=_seeds(settings.random_seed),
    )
    # The model lives as long as the process: keep the collector from walking it again and again.
    gc.collect()
    gc.freeze()
    log.info(
        "%s loaded in %.1f s: %s on %s, %d tokens in %d pages",
        source.name,
        time.monotonic() - began,
        precision,
        plan.device,
        plan.tokens,
        plan.pages,
    )
    info = EngineInfo(
        model=source.name,
        architecture=type(loaded.model).__name__,
        device=plan.device,
        dtype=precision,
        attention_backend=backend.name,
        context_length=plan.context_length,
        page_size=plan.page_size,
        pool_tokens=plan.tokens,
        capacity_tokens={
            name: share.capacity for name, share in shares_in_tokens(cache, roster).items()
        },
        kv_bytes_per_token=plan.kv_bytes_per_token,
        weight_bytes=loaded.weight_bytes,
        vocab_size=vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_running_requests=settings.max_running_requests,
        max_queued_requests=settings.max_queued_requests,
    )
    return StartedEngine(engine, info)


def _source(settings: Settings) -> ModelSource:
    """The model on this machine. Of a hub model the config comes first, and is checked: no weight
    is downloaded that cannot be served."""
    where = (settings.revision, settings.cache_dir)
    found = locate(settings.model, settings.load_format, settings.cache_dir)
    if found.kind == "hub" and not found.dummy:
        config = loading.read_config(loading.directory_of(resolve(settings.model, "dummy", *where)))
        loading.choose_context_length(settings.context_length, config)
    return resolve(settings.model, settings.load_format, *where)


def serve(started: StartedEngine, runtime_dir: str, link: BlockingSupervisorLink) -> None:
    """Say ready, and run until the supervisor says stop."""
    engine, info = started
    boot = new_boot_id()
    address = engine_address(runtime_dir, boot)
    context: zmq.Context[Any] = zmq.Context.instance()
    requests = context.socket(zmq.ROUTER)
    configure_socket(requests)
    requests.bind(address)
    link.send(EngineReady(boot=boot, endpoint=address, info=info))
    poller = zmq.Poller()
    poller.register(requests, zmq.POLLIN)
    poller.register(link.socket, zmq.POLLIN)
    decoder = msgspec.msgpack.Decoder(ToEngine)
    encoder = msgspec.msgpack.Encoder()
    client: bytes | None = None
    retired: set[bytes] = set()
    while True:
        ready = dict(poller.poll(0 if engine.busy else engine.idle_ms))
        if link.socket in ready:
            while (message := link.receive_nowait()) is not None:
                if isinstance(message, Stop):
                    return
        if requests in ready:
            for identity, payload in _received(requests):
                if identity in retired:
                    continue  # queued by a dead API process, read after its successor's first
                if identity != client:
                    # The API process was restarted: nobody waits for what the old one asked for.
                    engine.abort_all()
                    if client is not None:
                        retired.add(client)
                    client = identity
                engine.receive(decoder.decode(payload))
        engine.tidy()
        if engine.busy:
            output = engine.step()
            if client is not None:
                # Unbounded and to a peer that may be gone: neither blocks nor fails.
                requests.send_multipart([client, encoder.encode(output)])


def _received(socket: zmq.Socket[bytes]) -> list[tuple[bytes, bytes]]:
    messages: list[tuple[bytes, bytes]] = []
    while True:
        try:
            identity, payload = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return messages
        messages.append((identity, payload))


def _seeds(random_seed: int | None) -> Callable[[str], int] | None:
    """A generator for each tenant: what one draws must not tell how much another has drawn."""
    if random_seed is None:
        return None
    generators: dict[str, random.Random] = {}

    def draw(tenant: str) -> int:
        if tenant not in generators:
            generators[tenant] = random.Random(f"{random_seed} {tenant}")
        return generators[tenant].getrandbits(63)

    return draw
