"""Token ids as bytes: 32-bit, little-endian, four bytes a token.

This is the form in which prompts cross processes and in which the radix tree compares them: an
immutable buffer, compared as memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4


def pack(token_ids: Iterable[int]) -> bytes:
    """The bytes of ``token_ids``.

    Raises:
        OverflowError: an id does not fit 32 bits.
    """
    return np.array(list(token_ids), dtype="<i4").tobytes()


def unpack(data: bytes) -> npt.NDArray[np.int32]:
    """A read-only view ``[tokens]`` of packed ids."""
    return np.frombuffer(data, dtype="<i4")


def common_prefix(
    left: bytes | bytearray, left_at: int, right: bytes | bytearray, right_at: int, limit: int
) -> int:
    """Equal bytes from the two places on, whole tokens, at most ``limit`` (whole tokens too)."""
    # A prompt that ends within an edge is the common case, and much cheaper to see.
    if left[left_at : left_at + limit] == right[right_at : right_at + limit]:
        return limit
    count = limit // TOKEN_BYTES
    a = np.frombuffer(left, dtype="<i4", count=count, offset=left_at)
    b = np.frombuffer(right, dtype="<i4", count=count, offset=right_at)
    differ = a != b
    return int(differ.argmax()) * TOKEN_BYTES
