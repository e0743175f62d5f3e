"""The one order of tokens: larger logits first, and equal logits by token id, smaller first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["best_ids", "best_ids_of_rows", "in_order"]

LogitArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]


NUM_FOLDS = 32
"""Slices of a row whose maxima are taken together."""

MIN_WIDTH = 4
"""Times k: narrower slices do not separate the best tokens from the others."""


def in_order(row: LogitArray, token_ids: IdArray) -> IdArray:
    """Return `token_ids` [C] sorted by their logits in `row` [V], best first."""
    packed = _packed(row[token_ids], token_ids)
    packed.sort()
    return packed & 0xFFFFFFFF


def _packed(logits: LogitArray, token_ids: IdArray) -> IdArray:
    """Return logit and id in one integer, so that a plain sort is exact about ties. A float32 read
    as an integer sorts like the number once the lower 31 bits of negative ones are flipped."""
    bits = (logits + np.float32(0.0)).view(np.int32)  # adding 0 turns -0.0 into 0.0
    ascending = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    return (~ascending).astype(np.int64) << 32 | token_ids


def best_ids(row: LogitArray, k: int) -> IdArray:
    """Return the k best token ids of `row` [V], best first; all of them if k >= V."""
    return best_ids_of_rows(row[None], np.zeros(1, np.int64), k)[0]


def best_ids_of_rows(logits: LogitArray, rows: IdArray, k: int) -> IdArray:
    """Return `best_ids` of `rows` [N] of logits [R, V] without NaN: [N, min(k, V)].

    NUM_FOLDS slices of a row are laid over one another. At least k tokens reach the k-th largest of
    the columns' maxima, so whole rows are read only once, for these maxima.
    """
    vocab_size = logits.shape[1]
    k = min(max(k, 0), vocab_size)
    width = vocab_size // NUM_FOLDS
    if k == 0 or width < MIN_WIDTH * k:
        found = [_best_of_row(logits[row], k) for row in rows.tolist()]
        return np.array(found, np.int64).reshape(len(found), k)
    size = NUM_FOLDS * width
    largest = np.empty((len(rows), width), np.float32)
    for i, row in enumerate(rows.tolist()):
        logits[row, :size].reshape(NUM_FOLDS, width).max(axis=0, out=largest[i])
    bounds = np.partition(largest, width - k, axis=1)[:, width - k]
    which, column = np.nonzero(largest >= bounds[:, None])
    ids = column[:, None] + width * np.arange(NUM_FOLDS)
    reaches = logits[rows[which][:, None], ids] >= bounds[which][:, None]
    which, ids = np.repeat(which, reaches.sum(axis=1)), ids[reaches]
    if size < vocab_size:
        last_which, last = np.nonzero(logits[rows, size:] >= bounds[:, None])
        which, ids = np.concatenate((which, last_which)), np.concatenate((ids, last + size))
    order = np.lexsort((_packed(logits[rows[which], ids], ids), which))
    starts = np.searchsorted(which[order], np.arange(len(rows)))
    return ids[order][starts[:, None] + np.arange(k)]


def _best_of_row(row: LogitArray, k: int) -> IdArray:
    if k in (0, row.size):
        return in_order(row, np.arange(k))
    least = np.partition(row, row.size - k)[row.size - k]
    return in_order(row, np.flatnonzero(row >= least))[:k]
