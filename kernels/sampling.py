"""Choosing the next token, for a batch of rows at once.

A row's result depends on that row's numbers alone.
"""

from __future__ import annotations

import torch

_TOP_CANDIDATES = 1024


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
    drawn in proportion, by inverting the cumulative distribution at the row's uniform number.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        temperature: float32 ``[rows]``; 0 takes the most likely token.
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
        probabilities = (logits[drawn] / temperature[drawn, None]).softmax(-1)
        cut = (top_k[drawn] > 0) | (top_p[drawn] < 1)
        for row in cut.nonzero().flatten().tolist():
            index = drawn[row]
            keep_most_likely(probabilities[row], int(top_k[index]), float(top_p[index]))
        floor = min_p[drawn, None] * probabilities.amax(-1, keepdim=True)
        probabilities.masked_fill_(probabilities < floor, 0)
        chosen[drawn] = invert(probabilities, uniform[drawn])
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
    total = 1.0
    # A full sort only where the few likeliest do not settle it.
    guess = count if top_k else min(_TOP_CANDIDATES, vocabulary)
    values, indices = probabilities.topk(guess)
    if top_k:
        total = float(values.sum())
    if not top_k and float(values.sum()) < top_p:
        values, indices = probabilities.sort(descending=True)
    if top_p < 1:
        before = values.cumsum(0) - values
        kept = int((before < top_p * total).sum())
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
    cumulative = weights.to(torch.float64).cumsum(-1)
    goal = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, goal, right=True).flatten()
