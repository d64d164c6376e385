"""The engine against transformers' own greedy text, whatever the cache and scheduler do."""

from __future__ import annotations

import random

import pytest

from ktserve.messages import Abort, RequestFailed


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 256) for _ in range(length)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prefill_tokens", [1, 7, 48])
def test_cold_and_warm_text_is_transformers_own(harness, reference, page_size, prefill_tokens):
    run = harness(page_size=page_size, pages=400 // page_size, prefill_tokens=prefill_tokens)
    tokens = prompt(1, 37)
    cold = run.send(tokens, max_tokens=20)
    run.finish()
    warm = run.send(tokens, max_tokens=20)
    run.finish()
    assert run.tokens[cold] == reference.greedy(tokens, 20)
    assert run.tokens[warm] == run.tokens[cold]
    assert run.cached[cold] == 0
    assert run.cached[warm] == 36 // page_size * page_size
    run.audit()


def test_many_at_once_are_each_as_if_alone(harness, reference):
    run = harness(pages=1000)
    prompts = [prompt(seed, 5 + seed * 3) for seed in range(12)]
    ids = [run.send(tokens, max_tokens=6 + index) for index, tokens in enumerate(prompts)]
    run.finish()
    for index, request_id in enumerate(ids):
        assert run.tokens[request_id] == reference.greedy(prompts[index], 6 + index)
    run.audit()


def test_other_namespaces_never_hit_and_their_own_second_request_does(harness, namespace):
    run = harness(pages=1000)
    tokens = prompt(2, 60)
    contexts = [
        namespace(),
        namespace(salt="a", key="bc"),
        namespace(salt="ab", key="c"),
        namespace(salt="abc"),
        namespace(key="abc"),
        namespace(tenant="u"),
    ]
    for hit in (0, 59):
        for context in contexts:
            request_id = run.send(tokens, context, max_tokens=4)
            run.finish()
            assert run.cached[request_id] == hit


def test_equal_cold_prompts_that_come_together_are_computed_once(harness, reference):
    run = harness(pages=1000, prefill_tokens=16)
    tokens = prompt(3, 40)
    ids = [run.send(tokens, max_tokens=5) for _ in range(4)]
    run.finish()
    assert [run.cached[one] for one in ids] == [0, 39, 39, 39]
    assert all(run.tokens[one] == reference.greedy(tokens, 5) for one in ids)


def test_equal_prompts_of_two_namespaces_do_not_wait_for_each_other(harness, namespace):
    run = harness(pages=1000, prefill_tokens=64, max_batched_tokens=200)
    tokens = prompt(4, 20)
    ids = [run.send(tokens, namespace(salt=salt), max_tokens=3) for salt in ("a", "b")]
    run.step()
    assert [run.tokens.get(one, []) != [] for one in ids] == [True, True]
    assert [run.cached[one] for one in ids] == [0, 0]


def test_a_generated_answer_is_cached_for_the_next_turn(harness, reference):
    run = harness()
    tokens = prompt(5, 10)
    first = run.send(tokens, max_tokens=6)
    run.finish()
    answer = run.tokens[first]
    turn = tokens + answer + prompt(6, 5)
    second = run.send(turn, max_tokens=4)
    run.finish()
    # The last token of the answer was sampled and never computed.
    assert run.cached[second] == len(tokens) + len(answer) - 1
    assert run.tokens[second] == reference.greedy(turn, 4)


def test_without_radix_cache_nothing_is_kept(harness, reference):
    run = harness(enabled=False)
    tokens = prompt(7, 30)
    for _ in range(2):
        request_id = run.send(tokens, max_tokens=4)
        run.finish()
        assert run.cached[request_id] == 0
        assert run.tokens[request_id] == reference.greedy(tokens, 4)
    assert run.cache.pool.free == run.cache.pool.total


@pytest.mark.parametrize("page_size", [1, 4])
def test_preemption_changes_no_text_and_is_bounded(harness, reference, page_size):
    run = harness(page_size=page_size, pages=96 // page_size, max_running=6)
    prompts = [prompt(10 + seed, 12) for seed in range(6)]
    ids = [run.send(tokens, max_tokens=60, ignore_eos=True) for tokens in prompts]
    seen: dict[int, int] = {}
    while run.engine.busy:
        run.step()
        run.audit()
        for one in (*run.scheduler.running, *run.scheduler.waiting):
            seen[one.request.request_id] = one.preemptions
    assert run.scheduler.preemptions > 0
    assert max(seen.values()) <= 3
    for index, request_id in enumerate(ids):
        expected = reference.greedy(prompts[index], 60)
        assert run.tokens[request_id][: len(expected)] == expected
        assert len(run.tokens[request_id]) == 60


def test_what_can_never_fit_is_refused_with_the_numbers(harness):
    run = harness(pages=50)
    request_id = run.send(prompt(20, 40), max_tokens=11)
    fits = run.send(prompt(20, 40), max_tokens=10, ignore_eos=True)
    run.finish()
    refusal = run.ended[request_id]
    assert isinstance(refusal, RequestFailed)
    assert refusal.status == 400
    assert all(number in refusal.message for number in ("40", "11", "51", "50"))
    assert len(run.tokens[fits]) == 10


def test_a_full_queue_refuses_and_says_when_to_come_again(harness):
    run = harness(max_running=1, max_queued=2)
    ids = [run.send(prompt(seed, 5)) for seed in range(4)]
    run.finish()
    refused = [one for one in ids if isinstance(run.ended[one], RequestFailed)]
    assert refused == ids[3:]  # one can run at once, two may wait
    assert all(run.ended[one].status == 429 for one in refused)
    assert all(run.ended[one].retry_after for one in refused)


def test_abort_in_every_state_gives_everything_back(harness):
    run = harness(max_running=2, prefill_tokens=8, pages=200)
    decoding = run.send(prompt(30, 6), max_tokens=100, ignore_eos=True)
    for _ in range(3):
        run.step()
    prefilling = run.send(prompt(31, 60), max_tokens=100)
    run.step()
    waiting = run.send(prompt(32, 6), max_tokens=100)
    run.step()
    assert run.tokens[decoding]
    assert prefilling not in run.tokens
    assert len(run.scheduler.waiting) == 1
    for request_id in (waiting, prefilling, decoding, 12345):
        run.engine.receive(Abort(request_id=request_id))
        run.engine.receive(Abort(request_id=request_id))
        run.audit()
    run.step()
    assert not run.engine.busy
    assert run.cache.available == run.cache.pool.total
    assert run.cache.accounts.private == 0


def test_a_new_api_process_starts_with_an_empty_engine(harness):
    run = harness(max_running=1)
    for seed in range(3):
        run.send(prompt(seed, 8), max_tokens=50, ignore_eos=True)
    run.step()
    run.engine.abort_all()
    run.step()
    assert not run.engine.busy
    assert run.cache.available == run.cache.pool.total


def test_lpm_admits_the_longest_match_first(harness):
    cached = prompt(40, 30)
    for policy, order in (("fcfs", "cold first"), ("lpm", "warm first")):
        run = harness(max_running=1, policy=policy)
        run.send(cached, max_tokens=1)
        run.finish()
        blocker = run.send(prompt(41, 4), max_tokens=3, ignore_eos=True)
        run.step()
        cold = run.send(prompt(42, 30), max_tokens=1)
        warm = run.send(cached, max_tokens=1)
        run.finish()
        finished = [one for one in run.ended if one in (cold, warm)]
        assert finished == ([cold, warm] if order == "cold first" else [warm, cold])
        assert blocker in run.ended


def test_random_life_harms_no_bystander(harness, reference):
    """Aborts, stops and lengths at random moments on a pool that evicts and preempts."""
    for page_size in (1, 4, 16):
        life(harness(page_size=page_size, pages=160 // page_size, max_running=6), reference)


def life(run, reference) -> None:
    draw = random.Random(run.cache.page_size)
    starts = [prompt(100 + index, 20) for index in range(6)]
    sent: dict[int, tuple[list[int], int, bool]] = {}
    to_send = 170
    while to_send or run.engine.busy:
        if to_send and draw.random() < 0.5:
            to_send -= 1
            tokens = draw.choice(starts)[: draw.randrange(4, 21)] + prompt(draw.randrange(8), 6)
            count = draw.randrange(1, 40)
            request_id = run.send(tokens, max_tokens=count)
            sent[request_id] = (tokens, count, False)
        if draw.random() < 0.08:
            alive = [one for one in sent if one not in run.ended and not sent[one][2]]
            if alive:
                victim = draw.choice(alive)
                sent[victim] = (*sent[victim][:2], True)
                run.engine.receive(Abort(request_id=victim))
        run.step()
        run.audit()
    assert run.scheduler.preemptions > 0
    assert run.cache.accounts.evicted > 0
    survivors = 0
    for request_id, (tokens, count, aborted) in sent.items():
        expected = reference.greedy(tokens, count)
        got = run.tokens.get(request_id, [])
        if aborted:
            assert got == expected[: len(got)]
            continue
        survivors += 1
        assert got == expected
        assert run.ended[request_id].finish == ("stop" if got[-1] == 0 else "length")
    assert survivors > 90
    assert run.cache.available == run.cache.pool.total


@pytest.mark.parametrize(
    ("tokens", "sampling", "named"),
    [
        ([], {}, "prompt"),
        ([1, 256], {}, "256"),
        ([1, -1], {}, "-1"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"logit_bias": {256: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids"),
        ([1], {"logprobs": 257}, "logprobs"),
    ],
)
def test_what_would_break_a_step_is_refused(harness, reference, tokens, sampling, named):
    run = harness()
    bad = run.send(tokens, **sampling)
    good = run.send(prompt(50, 9))
    run.finish()
    assert run.ended[bad].status == 400
    assert named in run.ended[bad].message
    assert run.tokens[good] == reference.greedy(prompt(50, 9), 8)


def test_lpm_starves_nobody(harness):
    run = harness(max_running=1, policy="lpm")
    now = [0.0]
    run.scheduler._clock = lambda: now[0]
    run.engine._clock = lambda: now[0]
    warm = prompt(60, 30)
    run.send(warm, max_tokens=1)
    run.finish()
    cold = run.send(prompt(61, 30), max_tokens=1)
    steps = 0
    while cold not in run.ended and steps < 60:
        steps += 1
        run.send(warm, max_tokens=1)
        run.send(warm, max_tokens=1)
        run.step()
        now[0] += 0.1
    # Overtaken at first, then not.
    assert 5 < steps < 30


def test_a_protected_sequence_leaves_the_rest_of_the_pool_to_others(harness):
    run = harness(pages=400, max_running=4)
    long = run.send(prompt(70, 10), max_tokens=380, ignore_eos=True)
    run.scheduler.waiting[0].preemptions = 3
    run.step()
    short = run.send(prompt(71, 20), max_tokens=10, ignore_eos=True)
    while short not in run.ended:
        run.step()
        run.audit()
    assert long not in run.ended
    run.finish()
    assert len(run.tokens[long]) == 380


def test_protected_sequences_run_together_only_as_the_pool_can_hold_them(harness):
    run = harness(pages=100, max_running=4)
    ids = [run.send(prompt(80 + n, 10), max_tokens=50, ignore_eos=True) for n in range(3)]
    for one in run.scheduler.waiting:
        one.preemptions = 3
    most = 0
    while run.engine.busy:
        run.step()
        run.audit()
        most = max(most, len(run.scheduler.running))
    assert most == 1  # two of 60 are more than 100
    assert run.scheduler.preemptions == 0
    assert all(len(run.tokens[one]) == 50 for one in ids)


def test_a_common_first_token_is_no_reason_to_wait(harness):
    run = harness(pages=1000, prefill_tokens=200, max_batched_tokens=300)
    ids = [run.send([9, *prompt(90 + n, 20)], max_tokens=1) for n in range(6)]
    run.step()
    assert all(one in run.ended for one in ids)
