"""An engine over a small random model, in this process: real scheduling, cache and attention."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ktserve.attention import ATTENTION_NAME, KVStorage, create_backend, register
from ktserve.cache.audit import audit
from ktserve.cache.manager import CacheManager
from ktserve.cache.pool import PagePool
from ktserve.cache.tables import BlockTable
from ktserve.engine.engine import Engine
from ktserve.engine.runner import ModelRunner
from ktserve.engine.sampler import Sampler
from ktserve.engine.scheduler import Scheduler, SchedulerLimits
from ktserve.engine.steplog import StepLog
from ktserve.messages import (
    CacheOptions,
    Request,
    RequestFailed,
    SamplingParams,
    TenantCache,
    TokenOutput,
)
from ktserve.models.loading import LoadedModel
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import pack

VOCABULARY = 256
EOS = 0


class Reference:
    """transformers' own model and greedy text."""

    def __init__(self) -> None:
        torch.manual_seed(20)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=1024,
            # Larger than usual, so that greedy text is varied and its choices clear.
            initializer_range=0.3,
        )
        self.model = LlamaForCausalLM(config).eval()
        self.paged = LlamaForCausalLM(copy.deepcopy(config)).eval()
        self.paged.load_state_dict(self.model.state_dict())
        register()
        self.paged.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def greedy(self, prompt: Iterable[int], count: int) -> list[int]:
        """The next ``count`` tokens, fewer where the sequence ends itself."""
        tokens = torch.tensor([list(prompt)])
        output = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
        text: list[int] = output[0, tokens.shape[1] :].tolist()
        return text


class Harness:
    """An engine and what it said."""

    def __init__(
        self,
        reference: Reference,
        cache_options: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: int | str | bool,
    ) -> None:
        page_size = int(options.pop("page_size", 1))
        pages = int(options.pop("pages", 400))
        enabled = bool(options.pop("enabled", True))
        limits: dict[str, int | str] = {
            "max_running": 8,
            "max_queued": 1000,
            "max_batched_tokens": 64,
            "prefill_tokens": 48,
            "policy": "fcfs",
        }
        limits.update(options)
        self.cache = CacheManager(
            PagePool(pages), page_size, enabled=enabled, **(cache_options or {})
        )
        self.scheduler = Scheduler(self.cache, SchedulerLimits(**limits))
        storage = KVStorage(
            layers=2,
            pages=pages,
            page_size=page_size,
            kv_heads=2,
            head_dim=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for tensor in (*storage.keys, *storage.values):
            tensor.fill_(float("nan"))  # reading a slot that nobody wrote shows in every logit
        loaded = LoadedModel(reference.paged, reference.paged.config, (EOS,), 0)
        self._seeds = itertools.count(1)
        self.engine = Engine(
            scheduler=self.scheduler,
            cache=self.cache,
            runner=ModelRunner(loaded, storage, create_backend("torch"), torch.device("cpu")),
            sampler=Sampler((EOS,), VOCABULARY),
            eos_token_ids=(EOS,),
            steplog=StepLog(b"key"),
            draw_seed=lambda _tenant: next(self._seeds),
            clock=clock,
        )
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, TokenOutput | RequestFailed] = {}
        self.cached: dict[int, int] = {}
        self.outputs: dict[int, list[TokenOutput]] = {}
        self.told: list[tuple[TenantCache, ...]] = []
        self._ids = itertools.count(1)

    def send(
        self,
        prompt: Iterable[int],
        namespace: Namespace | None = None,
        cache: CacheOptions | None = None,
        **sampling: object,
    ) -> int:
        """Queue a request, greedy unless it says otherwise; returns its id."""
        request_id = next(self._ids)
        parameters = {"max_tokens": 8, "temperature": 0.0, **sampling}
        self.engine.receive(
            Request(
                request_id=request_id,
                namespace=namespace or make_namespace(),
                prompt=pack(prompt),
                sampling=SamplingParams(**parameters),
                cache=cache or CacheOptions(),
            )
        )
        return request_id

    def step(self) -> None:
        output = self.engine.step()
        self.told.append(output.stats.tenants)
        for one in output.outputs:
            if isinstance(one, RequestFailed):
                self.ended[one.request_id] = one
                continue
            self.outputs.setdefault(one.request_id, []).append(one)
            self.tokens.setdefault(one.request_id, []).extend(one.token_ids)
            if one.cached_tokens is not None:
                assert one.request_id not in self.cached, "cached_tokens is said once"
                self.cached[one.request_id] = one.cached_tokens
            if one.finish is not None:
                self.ended[one.request_id] = one

    def finish(self, most: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most):
            if not self.engine.busy:
                return
            self.step()
        raise AssertionError(f"still busy after {most} steps")

    def tables(self) -> list[BlockTable]:
        return [one.table for one in self.scheduler.running if one.table is not None]

    def audit(self) -> None:
        audit(self.cache, self.tables())


def make_namespace(tenant: str = "t", salt: str | None = None, key: str | None = None) -> Namespace:
    return Namespace(tenant=tenant, cache_salt=salt, extra_key=key, adapter=None)


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    # The model is too small to share out, and threads that wait for a busy core take seconds.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Reference()
    torch.set_num_threads(threads)


@pytest.fixture
def harness(reference: Reference) -> Callable[..., Harness]:
    def build(**options: Any) -> Harness:
        return Harness(reference, **options)

    return build


@pytest.fixture
def namespace() -> Callable[..., Namespace]:
    return make_namespace
