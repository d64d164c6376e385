"""What the engine itself insists on: a request that breaks it would break the step of everybody."""

from __future__ import annotations

from ktserve.messages import Request
from ktserve.tokens import TOKEN_BYTES, unpack


def why_refused(request: Request, vocab_size: int) -> str | None:
    """Why ``request`` cannot be run, or None.

    The API checks what clients send, and in more detail. This is the last line: a tokenizer may
    know more tokens than its model, and the two processes may differ.
    """
    if not request.prompt or len(request.prompt) % TOKEN_BYTES:
        return "the prompt has no tokens; send at least one"
    tokens = unpack(request.prompt)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        return (
            f"the prompt has the token id {low if low < 0 else high}; this model has ids from 0 to"
            f" {vocab_size - 1}. Remove the text that it stands for"
        )
    sampling = request.sampling
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 1"
    named = [*(sampling.logit_bias or ()), *sampling.stop_token_ids]
    if any(not 0 <= token < vocab_size for token in named):
        return f"logit_bias or stop_token_ids name a token beyond {vocab_size - 1}"
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= vocab_size:
        return f"logprobs is {sampling.logprobs}; this model has {vocab_size} tokens"
    return None
