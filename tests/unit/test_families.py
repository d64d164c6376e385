"""Each tested family gives transformers' own logits on paged attention.

The reference is transformers' eager attention on the whole sequence, alone, without any cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from ktserve.attention import ATTENTION_NAME, KVStorage, PagedBatch, create_backend, register
from ktserve.models.architectures import PROVEN, check, model_class
from ktserve.models.cpu_linear import Packing, choose, pack
from ktserve.models.fusing import MergedPart, fuse
from ktserve.models.memory import kv_shape

VOCABULARY = 97
WINDOW = 6
TOLERANCE = 1e-4
PAGES = 160

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "Qwen2ForCausalLM": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "Qwen3ForCausalLM": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "MistralForCausalLM": lambda: transformers.MistralConfig(
        **SMALL, head_dim=8, sliding_window=WINDOW
    ),
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(
        **SMALL,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=24,
        final_logit_softcapping=4.0,
    ),
    "Qwen3MoeForCausalLM": lambda: cast("Any", transformers.Qwen3MoeConfig)(
        **SMALL,
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}


def make_model(family: str) -> PreTrainedModel:
    """A model whose norms and biases are random too, so that leaving one out shows."""
    config = FAMILIES[family]()
    config.architectures = [family]
    torch.manual_seed(5)
    model = model_class(config)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.requires_grad_(False)


@dataclass
class Held:
    """Tokens, and pages for them in no particular order."""

    tokens: list[int]
    table: torch.Tensor
    written: int = 0


class Served:
    """A model on pages that hold NaN until they are written."""

    def __init__(
        self,
        reference: PreTrainedModel,
        *,
        page_size: int,
        fused: bool,
        packing: Packing | None = None,
    ) -> None:
        register()
        self.model = copy.deepcopy(reference)
        self.model.set_attn_implementation(ATTENTION_NAME)
        if fused:
            assert fuse(self.model) > 0
        if packing is not None:
            assert pack(self.model, packing) == ()
        config = self.model.config
        kv_heads, head_dim = kv_shape(config)
        self.page_size = page_size
        self.storage = KVStorage(
            layers=config.num_hidden_layers,
            pages=PAGES,
            page_size=page_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for pages in (*self.storage.keys, *self.storage.values):
            pages.fill_(float("nan"))
        self._free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).tolist()

    def sequence(self, tokens: list[int], room: int = 0) -> Held:
        count = -(-(len(tokens) + room) // self.page_size)
        pages = [self._free.pop() for _ in range(count)]
        return Held(tokens, torch.tensor(pages))

    def step(self, parts: Sequence[tuple[Held, int]]) -> list[torch.Tensor]:
        """Run the next ``count`` tokens of each sequence; their logits ``[count, vocabulary]``."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, count in parts:
            for position in range(sequence.written, sequence.written + count):
                ids.append(sequence.tokens[position])
                positions.append(position)
                page = int(sequence.table[position // self.page_size])
                slots.append(page * self.page_size + position % self.page_size)
            sequence.written += count
        output = self.model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=torch.arange(len(ids)),
            paged=PagedBatch(
                storage=self.storage,
                backend=create_backend("torch"),
                query_lens=[count for _, count in parts],
                context_lens=[sequence.written for sequence, _ in parts],
                block_tables=[sequence.table for sequence, _ in parts],
                write_slots=torch.tensor(slots),
            ),
        )
        return list(output.logits[0].split([count for _, count in parts]))


def tokens_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


def expected(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_close(actual: torch.Tensor, reference: torch.Tensor) -> None:
    assert actual.shape == reference.shape
    assert (actual - reference).abs().max().item() <= TOLERANCE


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(
    params=[(1, False, False), (1, True, False), (4, True, False), (1, True, True)],
    ids=["1", "1-fused", "4-fused", "1-packed"],
)
def served(request: pytest.FixtureRequest, reference: PreTrainedModel) -> Served:
    page_size, fused, packed = request.param
    packing = chosen("float32") if packed else None
    return Served(reference, page_size=page_size, fused=fused, packing=packing)


def chosen(cpu_weights: str) -> Packing:
    packing = choose(cpu_weights, torch.float32, torch.device("cpu"))
    if packing is None or packing.label != cpu_weights:
        pytest.skip(f"this torch has no packed {cpu_weights} weights here")
    return packing


def test_every_proven_family_is_here() -> None:
    assert FAMILIES.keys() == PROVEN


def test_family_is_accepted_without_a_warning(reference: PreTrainedModel) -> None:
    assert check(reference.config) is None


def test_whole_prefill(served: Served, reference: PreTrainedModel) -> None:
    tokens = tokens_of(3 * WINDOW + 1, seed=2)
    assert_close(
        served.step([(served.sequence(tokens), len(tokens))])[0], expected(reference, tokens)
    )


@pytest.mark.parametrize("chunk", [2, 5, 8])
def test_chunked_prefill(served: Served, reference: PreTrainedModel, chunk: int) -> None:
    tokens = tokens_of(23, seed=3)
    sequence = served.sequence(tokens)
    logits = [
        served.step([(sequence, min(chunk, len(tokens) - start))])[0]
        for start in range(0, len(tokens), chunk)
    ]
    assert_close(torch.cat(logits), expected(reference, tokens))


def test_decode_token_by_token(served: Served, reference: PreTrainedModel) -> None:
    tokens = tokens_of(9, seed=4)
    sequence = served.sequence(tokens, room=12)
    logits = [served.step([(sequence, len(tokens))])[0]]
    for _ in range(12):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(served.step([(sequence, 1)])[0])
    assert_close(torch.cat(logits), expected(reference, tokens))


def test_mixed_batch(served: Served, reference: PreTrainedModel) -> None:
    """Decode, a chunk of a prefill and a whole prefill share steps, in any order."""
    texts = [tokens_of(length, seed=length) for length in (14, 20, 11)]
    first, second, third = (served.sequence(text) for text in texts)
    done: list[list[torch.Tensor]] = [[], [], []]

    def step(*parts: tuple[int, Held, int]) -> None:
        outputs = served.step([(sequence, count) for _, sequence, count in parts])
        for (index, _, _), logits in zip(parts, outputs, strict=True):
            done[index].append(logits)

    step((0, first, 12))
    step((1, second, 7), (0, first, 1))
    step((0, first, 1), (2, third, 10), (1, second, 8))
    step((2, third, 1), (1, second, 5))
    for logits, text in zip(done, texts, strict=True):
        assert_close(torch.cat(logits), expected(reference, text))


def test_prefix_from_pages_already_written(served: Served, reference: PreTrainedModel) -> None:
    """Two sequences read the pages of a third's prefix, and write pages of their own."""
    prefix = tokens_of(16, seed=6)
    owner = served.sequence(prefix)
    served.step([(owner, len(prefix))])
    texts = [prefix + tokens_of(length, seed=length) for length in (7, 1)]
    borrowers = []
    for text in texts:
        own = served.sequence(text[len(prefix) :])
        borrowers.append(Held(text, torch.cat([owner.table, own.table]), written=len(prefix)))
    outputs = served.step([(borrower, len(borrower.tokens) - 16) for borrower in borrowers])
    for logits, text in zip(outputs, texts, strict=True):
        assert_close(logits, expected(reference, text)[len(prefix) :])


def test_a_wrong_prefix_shows(served: Served, reference: PreTrainedModel) -> None:
    """The control of the test above: with another prefix's pages the logits differ."""
    prefix, other = tokens_of(16, seed=6), tokens_of(16, seed=7)
    owner = served.sequence(other)
    served.step([(owner, len(other))])
    text = prefix + tokens_of(4, seed=8)
    own = served.sequence(text[16:])
    borrower = Held(text, torch.cat([owner.table, own.table]), written=16)
    difference = served.step([(borrower, 4)])[0] - expected(reference, text)[16:]
    assert difference.abs().max().item() > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["MistralForCausalLM", "Gemma3ForCausalLM"])
def test_the_sliding_window_is_shorter_than_the_prompts(family: str) -> None:
    """The control of the window: without it the reference itself gives other logits."""
    model, tokens = make_model(family), tokens_of(20, seed=9)
    wide = copy.deepcopy(model)
    wide.config.sliding_window = 256
    for module in wide.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = 256
    difference = expected(model, tokens) - expected(wide, tokens)
    assert difference[:WINDOW].abs().max().item() <= TOLERANCE
    assert difference[WINDOW:].abs().max().item() > 100 * TOLERANCE


def test_fused_model_has_the_same_logits_and_weights(reference: PreTrainedModel) -> None:
    fused = copy.deepcopy(reference)
    bytes_before = sum(p.numel() for p in reference.parameters())
    fuse(fused)
    assert sum(p.numel() for p in fused.parameters()) == bytes_before
    assert all(isinstance(layer.self_attn.q_proj, MergedPart) for layer in fused.model.layers)
    tokens = tokens_of(17, seed=10)
    difference = expected(fused, tokens) - expected(reference, tokens)
    assert difference.abs().max().item() <= 1e-5


def test_float16_weights_move_the_logits_a_little(reference: PreTrainedModel) -> None:
    packing = chosen("float16")
    served = Served(reference, page_size=1, fused=True, packing=packing)
    tokens = tokens_of(23, seed=11)
    sequence = served.sequence(tokens)
    logits = torch.cat([served.step([(sequence, count)])[0] for count in (9, 1, 12, 1)])
    correct = expected(reference, tokens)
    error = ((logits - correct).norm() / correct.norm()).item()
    assert 0 < error <= 2e-3
