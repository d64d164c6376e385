"""Sampling parameters, through the engine and in the kernel."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from ktserve.engine.process import _seeds
from ktserve.engine.sampler import uniform
from ktserve.kernels.sampling import invert, keep_most_likely, sample

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def draw_many(logits: list[float], count: int = 4000, **parameters: float) -> Counter[int]:
    rows = torch.tensor([logits]).repeat(count, 1)

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), parameters.get(name, default), dtype=dtype)

    tokens = sample(
        rows,
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int64),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        torch.tensor([uniform(7, i) for i in range(count)], dtype=torch.float64),
    )
    return Counter(tokens.tolist())


LOGITS = [math.log(p) for p in (0.4, 0.3, 0.2, 0.07, 0.03)]


def test_frequencies_are_the_softmax():
    counts = draw_many(LOGITS)
    for token, expected in enumerate((0.4, 0.3, 0.2, 0.07, 0.03)):
        assert counts[token] / 4000 == pytest.approx(expected, abs=0.03)


def test_temperature_sharpens_and_zero_is_greedy():
    assert draw_many(LOGITS, temperature=0.25)[0] > draw_many(LOGITS)[0] + 800
    assert draw_many(LOGITS, temperature=0.0) == {0: 4000}


@pytest.mark.parametrize(
    ("parameters", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.69}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 1e-6}, {0}),
        ({"min_p": 0.4}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
    ],
)
def test_truncation_allows_exactly_the_likeliest(parameters, allowed):
    assert set(draw_many(LOGITS, **parameters)) == allowed


def test_top_p_beyond_the_first_candidates_equals_a_full_sort():
    torch.manual_seed(0)
    row = torch.randn(5000).mul(0.1).softmax(-1)
    kept = row.clone()
    keep_most_likely(kept, 0, 0.9)
    values, _ = row.sort(descending=True)
    expected = int((values.cumsum(0) - values < 0.9).sum())
    assert expected > 1024
    assert int((kept > 0).sum()) == expected


def test_inversion_never_lands_on_weight_zero():
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(3, 1)
    assert invert(weights, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [
        1,
        3,
        3,
    ]


def test_uniform_is_spread_and_differs_by_seed_and_position():
    values = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(values)) == 10000
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / 10000 == pytest.approx(0.5, abs=0.02)
    # Neighbouring seeds and positions must not move together.
    pairs = itertools.pairwise(values)
    assert sum(a * b for a, b in pairs) / 9999 == pytest.approx(0.25, abs=0.02)
    assert uniform(-5, 3) == uniform(-5, 3)


def test_a_seeded_request_gives_the_same_tokens_in_any_company(harness):
    alone = harness()
    one = alone.send(PROMPT, temperature=1.0, seed=11, max_tokens=30, ignore_eos=True)
    alone.finish()
    crowd = harness(pages=90)
    draw = random.Random(1)
    for _ in range(3):
        crowd.send([draw.randrange(1, 256) for _ in range(9)], temperature=1.0, max_tokens=30)
    other = crowd.send(PROMPT, temperature=1.0, seed=11, max_tokens=30, ignore_eos=True)
    crowd.finish()
    assert crowd.scheduler.preemptions > 0
    assert crowd.tokens[other] == alone.tokens[one]
    different = alone.send(PROMPT, temperature=1.0, seed=12, max_tokens=30, ignore_eos=True)
    alone.finish()
    assert alone.tokens[different] != alone.tokens[one]


def test_stop_ids_end_and_ignore_eos_does_not(harness, reference):
    run = harness()
    text = reference.greedy(PROMPT, 12)
    stop = text[5]
    first = text.index(stop)
    stopped = run.send(PROMPT, max_tokens=12, stop_token_ids=(stop,))
    run.finish()
    assert run.tokens[stopped] == text[: first + 1]
    assert run.ended[stopped].finish == "stop"
    assert run.ended[stopped].stopped_by_token
    # Biased towards the end of sequence, it ends at once, or (ignoring it) at its length.
    ended = run.send(PROMPT, max_tokens=5, logit_bias={0: 100.0})
    ignored = run.send(PROMPT, max_tokens=5, logit_bias={0: 100.0}, ignore_eos=True)
    run.finish()
    assert run.tokens[ended] == [0]
    assert run.tokens[ignored] == [0] * 5
    assert run.ended[ignored].finish == "length"


def test_min_tokens_puts_the_end_off(harness):
    run = harness()
    late = run.send(PROMPT, max_tokens=9, min_tokens=4, logit_bias={0: 100.0})
    run.finish()
    assert len(run.tokens[late]) == 5
    assert run.tokens[late][-1] == 0
    assert 0 not in run.tokens[late][:4]


def test_penalties_and_bias_change_the_choice(harness, reference):
    run = harness()
    greedy = reference.greedy(PROMPT, 12)
    loop = {greedy[0]: 50.0}
    biased = run.send(PROMPT, max_tokens=6, logit_bias=loop)
    banned = run.send(PROMPT, max_tokens=6, logit_bias={greedy[0]: -100.0})
    presence = run.send(PROMPT, max_tokens=6, logit_bias=loop, presence_penalty=2.0)
    frequency = run.send(PROMPT, max_tokens=40, logit_bias=loop, frequency_penalty=2.0)
    repetition = run.send(PROMPT, max_tokens=6, repetition_penalty=1e6)
    run.finish()
    assert run.tokens[biased] == [greedy[0]] * 6
    assert greedy[0] not in run.tokens[banned]
    assert run.tokens[presence] == run.tokens[biased]  # 50 - 2 still wins
    assert len(set(run.tokens[frequency])) > 1  # 50 - 2n does not for long
    assert not set(run.tokens[repetition]) & set(PROMPT)
    assert len(set(run.tokens[repetition])) == 6


@torch.inference_mode()
def test_logprobs_are_the_models_own(harness, reference):
    run = harness()
    one = run.send(PROMPT, max_tokens=3, logprobs=4, logit_bias={7: 100.0}, ignore_eos=True)
    plain = run.send(PROMPT, max_tokens=3, logprobs=0, ignore_eos=True)
    run.finish()
    tokens = list(PROMPT)
    for output in run.outputs[one]:
        expected = reference.model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        (reported,) = output.logprobs
        assert output.token_ids == [7]
        assert reported.logprob == pytest.approx(float(expected[7]), abs=2e-4)
        values, ids = expected.topk(4)
        assert [token for token, _ in reported.top] == ids.tolist()
        assert [value for _, value in reported.top] == pytest.approx(values.tolist(), abs=2e-4)
        tokens += output.token_ids
    assert all(output.logprobs[0].top == [] for output in run.outputs[plain])


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-38},
        {"top_p": 1e-300},
        {"top_p": 1e-46, "top_k": 5},
        {"temperature": 1.0, "repetition_penalty": 1e-300},
        {"temperature": 1.0, "repetition_penalty": 1e-40},
        {"temperature": 1.0, "repetition_penalty": 1e300},
        {"temperature": 1.0, "frequency_penalty": -2.0, "logit_bias": {5: 100.0}},
    ],
)
def test_extreme_parameters_give_a_token_of_the_vocabulary(harness, parameters):
    run = harness()
    sampling = {"temperature": 1.0, "logprobs": 2, "ignore_eos": True, "max_tokens": 5}
    one = run.send(PROMPT, **(sampling | parameters))
    run.finish()
    assert len(run.tokens[one]) == 5
    assert all(0 <= token < 256 for token in run.tokens[one])


def test_a_row_without_a_distribution_gives_its_argmax_and_harms_no_other():
    rows = torch.tensor([LOGITS, [float("nan")] * 5, [float("-inf")] * 5, LOGITS])
    ones = torch.ones(4)
    tokens = sample(rows, ones, ones.long() * 0, ones, ones * 0, torch.full((4,), 0.5).double())
    assert tokens[0] == tokens[3] == 1
    assert all(0 <= token < 5 for token in tokens.tolist())


def test_inversion_finds_the_same_token_as_one_running_sum():
    torch.manual_seed(1)
    weights = torch.rand(200, 5000) * (torch.rand(200, 5000) < 0.1)
    uniforms = torch.rand(200, dtype=torch.float64)
    cumulative = weights.double().cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    assert invert(weights, uniforms).tolist() == expected.flatten().tolist()


def test_one_tenants_draws_tell_nothing_of_anothers():
    draw = _seeds(7)
    alone = [draw("a") for _ in range(3)]
    again = _seeds(7)
    mixed = []
    for _ in range(3):
        again("b")
        mixed.append(again("a"))
    assert mixed == alone
    assert _seeds(8)("a") != alone[0]
