"""The packaged model's logits do not depend on what shares a step, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from servers import CACHE

from ktserve.config import Settings
from ktserve.engine.engine import Engine
from ktserve.engine.process import start
from ktserve.engine.runner import ModelRunner
from ktserve.engine.scheduler import Batch
from ktserve.messages import Request, SamplingParams
from ktserve.models import cpu_linear
from ktserve.models.loading import load
from ktserve.models.source import resolve
from ktserve.models.tokenizer import load_tokenizer
from ktserve.tenancy.namespace import Namespace
from ktserve.tenancy.tenants import load_roster
from ktserve.tokens import pack

PROMPTS = 20
TOKENS = 3

TEXT = """\
The sea is never still. Rivers carry salt and sand into it, the wind lifts waves on its surface,
and the moon pulls its water up and lets it fall again twice a day. People have crossed it for as
long as they could build boats. They learned to read the stars, then to keep time, and at last to
draw maps that showed every coast. Today most goods still travel by ship. A large vessel carries
thousands of boxes, each as big as a small room, from one port to another in a few weeks, and the
crew that sails it is often smaller than a football team. Under the surface lie cables which carry
almost all of the world's messages; a ship with a plough lays them, and another mends them when an
anchor has torn one apart. Nobody has seen most of the sea floor. What we know of it comes from
echoes, from a few machines that went down, and from the fish that the nets bring up.
"""


class Key(NamedTuple):
    """A prompt, and how many tokens of its sequence were computed."""

    prompt: int
    computed: int


class Recorder:
    """Logits by prompt and place, and an engine that gives them."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.logits: dict[Key, torch.Tensor] = {}
        self._ids = iter(range(1, 10_000))
        run = ModelRunner.run

        def recording(runner: ModelRunner, batch: Batch) -> torch.Tensor:
            logits = run(runner, batch)
            rows = iter(logits.clone())
            for sequence, tokens, samples in batch.parts:
                if samples:
                    assert sequence.request.namespace.extra_key is not None
                    prompt = int(sequence.request.namespace.extra_key)
                    self.logits[Key(prompt, sequence.computed + tokens)] = next(rows)
            return logits

        monkeypatch.setattr(ModelRunner, "run", recording)

    def send(self, prompt: int, tokens: list[int], salt: str) -> None:
        namespace = Namespace(tenant="t", cache_salt=salt, extra_key=str(prompt), adapter=None)
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        self.engine.receive(
            Request(
                request_id=next(self._ids),
                namespace=namespace,
                prompt=pack(tokens),
                sampling=sampling,
            )
        )

    def finish(self) -> dict[Key, torch.Tensor]:
        while self.engine.busy:
            self.engine.step()
        found, self.logits = self.logits, {}
        return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    # Threads that wait for a busy core take minutes here.
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("cpu_weights", ["float16", "float32"])
def test_a_prompt_alone_and_in_random_batches(
    cpu_weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(max_total_tokens=4096, cache_dir=str(CACHE), cpu_weights=cpu_weights)
    started = start(settings, b"key", load_roster(settings))
    if f"weights {cpu_weights} (packed" not in started.info.dtype:
        pytest.skip(f"this machine runs {started.info.dtype}")
    recorder = Recorder(started.engine, monkeypatch)
    draw = random.Random(5)
    # Together they fit one step: a prompt that is cut in two is computed in other shapes.
    prompts = [
        [draw.randrange(3, 40_000) for _ in range(draw.randrange(1, 40))] for _ in range(PROMPTS)
    ]
    assert sum(map(len, prompts)) < 512
    alone: dict[Key, torch.Tensor] = {}
    for index, tokens in enumerate(prompts):
        recorder.send(index, tokens, "alone")
        alone |= recorder.finish()
    assert len(alone) == PROMPTS * TOKENS
    for trial in ("first", "second"):
        order = draw.sample(range(PROMPTS), PROMPTS)
        for index in order:
            recorder.send(index, prompts[index], trial)
            if draw.random() < 0.3:
                recorder.engine.step()
        together = recorder.finish()
        assert together.keys() == alone.keys()
        differing = [key for key in alone if not torch.equal(alone[key], together[key])]
        assert differing == []


@pytest.mark.usefixtures("one_thread")
def test_float16_weights_choose_the_tokens_of_float32() -> None:
    """The greedy choice at every place of an English text, and how far the logits are apart."""
    source = resolve(None, "auto", None, str(CACHE))
    assert source.directory is not None
    ids = torch.tensor([load_tokenizer(source.directory).encode(TEXT)])

    def logits(setting: str) -> torch.Tensor:
        packing = cpu_linear.choose(setting, torch.float32, torch.device("cpu"))
        if packing is None or packing.label != setting:
            pytest.skip(f"no packed {setting} weights here")
        loaded = load(
            source,
            dtype=torch.float32,
            device=torch.device("cpu"),
            packing=packing,
            attention="sdpa",
        )
        assert loaded.unpacked == ()
        with torch.inference_mode():
            found: torch.Tensor = loaded.model(ids, use_cache=False).logits[0]
        return found

    expected, actual = logits("float32"), logits("float16")
    assert ((actual - expected).norm() / expected.norm()).item() <= 2e-3
    same = (actual.argmax(-1) == expected.argmax(-1)).float().mean().item()
    assert same >= 0.98
