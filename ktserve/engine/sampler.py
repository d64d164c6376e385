"""From logits to tokens, by each request's sampling parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ktserve.engine.penalties import TokenCounts, apply
from ktserve.engine.sequence import Sequence
from ktserve.kernels.sampling import sample
from ktserve.messages import TokenLogprobs

_MASK64 = (1 << 64) - 1
_HIGHEST = 1e30
_LOWEST = -1e30

LOGPROB_DIGITS = 4
"""Decimals of a reported log-probability. What is beyond them moves with the shapes of a step,
and so with other tenants' load."""


class Sampled(NamedTuple):
    """A sequence's next token.

    Attributes:
        logprobs: where the request asked for them.
    """

    token: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Applies bias, penalties and bans, then draws.

    Args:
        eos_token_ids: the model's own ends of sequence.
        vocab_size: logits beyond it belong to no token.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._eos = eos_token_ids
        self.vocab_size = vocab_size

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """The next token of each sequence.

        Args:
            logits: ``[sequences, vocabulary]``, the model's own, changed in place.
        """
        logits = logits[:, : self.vocab_size].float()
        reported = self._reported(logits, sequences)
        for row, sequence in enumerate(sequences):
            self._adjust(logits[row], sequence)
        parameters = [sequence.request.sampling for sequence in sequences]
        device = logits.device
        chosen = sample(
            logits,
            torch.tensor([p.temperature for p in parameters], device=device),
            torch.tensor([p.top_k for p in parameters], device=device),
            torch.tensor([p.top_p for p in parameters], device=device),
            torch.tensor([p.min_p for p in parameters], device=device),
            torch.tensor(
                [uniform(one.seed, one.generated) for one in sequences],
                dtype=torch.float64,
                device=device,
            ),
        ).tolist()
        return [
            Sampled(token, self._logprobs(reported.get(row), token, sequences[row]))
            for row, token in enumerate(chosen)
        ]

    def _reported(self, logits: torch.Tensor, sequences: list[Sequence]) -> dict[int, torch.Tensor]:
        """Log-probabilities of the rows whose requests want them, before anything is adjusted."""
        return {
            row: logits[row].log_softmax(-1)
            for row, sequence in enumerate(sequences)
            if sequence.request.sampling.logprobs is not None
        }

    def _logprobs(
        self, row: torch.Tensor | None, token: int, sequence: Sequence
    ) -> TokenLogprobs | None:
        if row is None:
            return None
        count = sequence.request.sampling.logprobs or 0
        values, ids = row.topk(count)
        top = zip(ids.tolist(), values.tolist(), strict=True)
        return TokenLogprobs(
            round(float(row[token]), LOGPROB_DIGITS),
            [(other, round(value, LOGPROB_DIGITS)) for other, value in top],
        )

    def _adjust(self, row: torch.Tensor, sequence: Sequence) -> None:
        parameters = sequence.request.sampling
        if (
            parameters.repetition_penalty != 1.0
            or parameters.frequency_penalty
            or parameters.presence_penalty
        ):
            if sequence.counts is None:
                sequence.counts = TokenCounts(self.vocab_size)
            sequence.counts.follow(sequence)
            apply(row, sequence, sequence.counts)
            # A penalty may overflow a float; the best of the row must stay a number.
            row.nan_to_num_(nan=_LOWEST, posinf=_HIGHEST, neginf=_LOWEST)
        if parameters.logit_bias:
            biased = torch.tensor(list(parameters.logit_bias), device=row.device)
            row[biased] += torch.tensor(list(parameters.logit_bias.values()), device=row.device)
        if sequence.generated < parameters.min_tokens:
            banned = [*self._eos, *parameters.stop_token_ids]
            if banned:
                row[torch.tensor(banned, device=row.device)] = float("-inf")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a request's seed and the count of its tokens so far.

    It depends on nothing else, neither the batch nor what was drawn before, so a request that was
    preempted or shares a step with others draws the same. SplitMix64 (Steele, Lea and Flood 2014).
    """
    state = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)
