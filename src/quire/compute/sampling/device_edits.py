"""Changes of requests to their logits, in the form of the operation `edit_logits`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from quire.compute.sampling.edits import Penalties, RowEdits

__all__ = ["DeviceEdits", "Upload"]

Upload = Callable[[np.ndarray], torch.Tensor]

Ints = npt.NDArray[np.int32]

_ALIGNED = 4
"""Words of 32 bits in 16 bytes."""

_EARLY_STOP = -1
"""Instead of a word's length: a ban until the output has enough tokens."""


class DeviceEdits:
    """The lists of some rows on a device, in one copy. They are kept until other rows are asked
    for: between two steps it is mostly the same ones."""

    def __init__(self, upload: Upload) -> None:
        """upload: copies an array to the device."""
        self._upload = upload
        self._rows: tuple[RowEdits, ...] = ()
        self._tensors: tuple[torch.Tensor, ...] = ()

    def of(self, rows: Sequence[RowEdits]) -> tuple[torch.Tensor, ...]:
        """The arguments of `edit_logits` from `penalties` on, for rows whose edits kernels make."""
        same = len(rows) == len(self._rows) and all(map(_is, rows, self._rows))
        if not same or not self._tensors:
            self._tensors = _in_one_copy(_arrays(rows), self._upload)
            self._rows = tuple(rows)
        return self._tensors


def _is(one: RowEdits, other: RowEdits) -> bool:
    return one is other


def _arrays(rows: Sequence[RowEdits]) -> list[np.ndarray]:
    """Return arrays in the order of the operation's arguments."""
    allowed = [() if row.allowed_ids is None else row.allowed_ids for row in rows]
    bans, words = _bans(rows)
    return [
        np.array([row.penalties for row in rows], np.float64).reshape(-1, len(Penalties._fields)),
        _starts([row.bias_ids for row in rows]),
        _joined([row.bias_ids for row in rows]),
        np.concatenate([np.zeros(0, np.float32), *(row.bias_values for row in rows)]),
        _starts(allowed),
        _joined(allowed),
        _starts(bans),
        np.array([ban for of_row in bans for ban in of_row], np.int32).reshape(-1, 4),
        np.array(words, np.int32),
    ]


def _bans(rows: Sequence[RowEdits]) -> tuple[list[list[tuple[int, int, int, int]]], list[int]]:
    """Return (token, minimum, first, length) of each row's bans, and the words that `first`
    indexes."""
    bans: list[list[tuple[int, int, int, int]]] = []
    words: list[int] = []
    for row in rows:
        of_row = [(int(stop), row.min_tokens, 0, _EARLY_STOP) for stop in row.stop_ids]
        for *before, last in row.bad_words:
            of_row.append((last, 0, len(words), len(before)))
            words += before
        bans.append(of_row)
    return bans, words


def _starts(lists: Sequence[Sequence[object] | np.ndarray]) -> Ints:
    return np.array([0, *accumulate(len(each) for each in lists)], np.int32)


def _joined(lists: Sequence[Sequence[int] | np.ndarray]) -> Ints:
    return np.concatenate([np.zeros(0, np.int32), *lists]).astype(np.int32)


def _in_one_copy(arrays: Sequence[np.ndarray], upload: Upload) -> tuple[torch.Tensor, ...]:
    """Each begins at a multiple of 16 bytes: Triton compiles another kernel where one does not."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
    padded = [np.pad(each, (0, -len(each) % _ALIGNED)) for each in flat]
    pieces = upload(np.concatenate(padded)).split([len(each) for each in padded])
    return tuple(
        piece[: len(each)].view(torch.from_numpy(array).dtype).view(array.shape)
        for piece, each, array in zip(pieces, flat, arrays, strict=True)
    )
