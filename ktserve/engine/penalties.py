"""What a sequence has said so far, kept in the form that penalties need."""

from __future__ import annotations

import numpy as np
import torch

from ktserve.engine.sequence import Sequence
from ktserve.tokens import TOKEN_BYTES, unpack


class TokenCounts:
    """How often each token stands in a sequence; follows it token by token.

    Attributes:
        seen: bool ``[vocabulary]``: in the prompt or the output.
        output: int32 ``[vocabulary]``: times in the output.
    """

    def __init__(self, vocab_size: int) -> None:
        self.seen = np.zeros(vocab_size, dtype=np.bool_)
        self.output = np.zeros(vocab_size, dtype=np.int32)
        self._upto = 0

    def follow(self, sequence: Sequence) -> None:
        """Count the tokens that ``sequence`` has got since the last call."""
        fresh = unpack(bytes(sequence.tokens[self._upto * TOKEN_BYTES :]))
        self.seen[fresh] = True
        prompt = max(0, sequence.prompt_tokens - self._upto)
        np.add.at(self.output, fresh[prompt:], 1)
        self._upto = sequence.length


def apply(row: torch.Tensor, sequence: Sequence, counts: TokenCounts) -> None:
    """Repetition, frequency and presence penalty, in this order, on one row of logits in place.

    Repetition divides a positive logit of a seen token and multiplies a negative one (Keskar et
    al. 2019); frequency and presence are OpenAI's, over the output alone.
    """
    parameters = sequence.request.sampling
    if parameters.repetition_penalty != 1.0:
        seen = torch.from_numpy(counts.seen).to(row.device)
        penalty = parameters.repetition_penalty
        penalized = torch.where(row > 0, row / penalty, row * penalty)
        row.copy_(torch.where(seen, penalized, row))
    if parameters.frequency_penalty or parameters.presence_penalty:
        output = torch.from_numpy(counts.output).to(row.device)
        row -= parameters.frequency_penalty * output
        row -= parameters.presence_penalty * (output > 0)
