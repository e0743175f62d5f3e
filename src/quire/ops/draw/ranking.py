"""The one order of tokens: by logit, larger first; equal logits by token id, smaller first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["best_ids", "in_order"]

LogitArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]


def in_order(row: LogitArray, token_ids: IdArray) -> IdArray:
    """`token_ids` [C], best first by their logits in `row` [V].

    Logit and id are packed into one integer, so that a plain sort is exact about ties. A float32
    read as an integer sorts like the number once the lower 31 bits of negative ones are flipped.
    """
    bits = (row[token_ids] + np.float32(0.0)).view(np.int32)  # adding 0 turns -0.0 into 0.0
    ascending = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    packed = (~ascending).astype(np.int64) << 32 | token_ids
    packed.sort()
    return packed & 0xFFFFFFFF


def best_ids(row: LogitArray, k: int) -> IdArray:
    """The k best token ids of `row` [V], best first; all of them if k >= V."""
    vocab_size = row.size
    if k <= 0:
        return np.zeros(0, np.int64)
    if k >= vocab_size:
        return in_order(row, np.arange(vocab_size))
    least = np.partition(row, vocab_size - k)[vocab_size - k]
    return in_order(row, np.flatnonzero(row >= least))[:k]
