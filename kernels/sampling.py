"""Choosing the next token, for a batch of rows at once.

A row's result depends on that row's numbers alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_FIRST_CANDIDATES = 1024
_BLOCK = 256
_LEAST_TEMPERATURE = 1e-5


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row.

    Temperature first, then the k most likely, then of those the fewest whose probability is at
    least top_p, then of those the ones at least min_p times as likely as the best; what remains is
    drawn in proportion, by inverting the cumulative distribution at the row's uniform number. The
    most likely token always remains. A row without a distribution (NaN, no finite logit) gives its
    argmax.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        temperature: float32 ``[rows]``; 0 takes the most likely token, and less than 1e-5 is 1e-5.
        top_k: int64 ``[rows]``; 0 is off.
        top_p: float32 ``[rows]``, above 0; 1 is off.
        min_p: float32 ``[rows]``; 0 is off.
        uniform: float64 ``[rows]``, in [0, 1).

    Returns:
        int64 ``[rows]``.
    """
    chosen = logits.argmax(-1)
    drawn = (temperature > 0).nonzero().flatten()
    if len(drawn):
        scores = logits[drawn]
        # The best becomes 0: dividing by a small temperature then cannot overflow.
        scores = scores - scores.amax(-1, keepdim=True)
        scores /= temperature[drawn, None].clamp_min(_LEAST_TEMPERATURE)
        probabilities = scores.softmax(-1)
        cut = (top_k[drawn] > 0) | (top_p[drawn] < 1)
        for row in cut.nonzero().flatten().tolist():
            index = drawn[row]
            keep_most_likely(probabilities[row], int(top_k[index]), float(top_p[index]))
        floor = min_p[drawn, None] * probabilities.amax(-1, keepdim=True)
        probabilities.masked_fill_(probabilities < floor, 0)
        proper = probabilities.sum(-1) > 0  # False for NaN too
        chosen[drawn[proper]] = invert(probabilities[proper], uniform[drawn[proper]])
    return chosen


def keep_most_likely(probabilities: torch.Tensor, top_k: int, top_p: float) -> None:
    """Zero all of one row but its ``top_k`` likeliest, and of those all but the fewest that reach
    ``top_p`` of their sum.

    Args:
        probabilities: ``[vocabulary]``, changed in place.
        top_k: 0 is off.
        top_p: 1 is off.
    """
    vocabulary = len(probabilities)
    count = min(top_k or vocabulary, vocabulary)
    guess = count if top_k else min(_FIRST_CANDIDATES, vocabulary)
    values, indices = probabilities.topk(guess)
    # More of them are sorted only where the likeliest few do not settle it.
    while guess < count and float(values.sum()) < top_p:
        guess = min(8 * guess, count)
        values, indices = probabilities.topk(guess)
    if top_p < 1:
        total = float(values.sum()) if top_k else 1.0
        before = values.cumsum(0) - values
        kept = max(1, int((before < top_p * total).sum()))
        values, indices = values[:kept], indices[:kept]
    values = values.clone()
    probabilities.zero_()
    probabilities[indices] = values


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """For each row the first index at which the cumulative weight passes ``uniform`` of the sum.

    Args:
        weights: ``[rows, vocabulary]``, not negative, with a positive sum in each row.
        uniform: float64 ``[rows]``, in [0, 1).

    Returns:
        int64 ``[rows]``, each of positive weight.
    """
    vocabulary = weights.shape[-1]
    padded = F.pad(weights, (0, -vocabulary % _BLOCK)).view(len(weights), -1, _BLOCK)
    # Which block first, then where in it: a running sum over the whole row would cost ten times.
    blocks = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    total = blocks[:, -1:]
    # Rounding must not take it to the total, which no block passes.
    goal = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    block = torch.searchsorted(blocks, goal, right=True)
    before = torch.where(block > 0, blocks.gather(-1, (block - 1).clamp_min(0)), 0.0)
    rows = torch.arange(len(weights), device=weights.device)
    inside = padded[rows, block[:, 0]].to(torch.float64)
    cumulative = inside.cumsum(-1)
    # The two sums may differ in the last bit; the last token of positive weight is the limit.
    place = torch.searchsorted(cumulative, goal - before, right=True)
    last = _BLOCK - 1 - (inside > 0).flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(place, last)).flatten()
