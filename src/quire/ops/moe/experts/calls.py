"""Calls of linear kernels in the form of csrc/moe/experts.cpp, for the rows of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from quire.ops.native.replay import KernelCall

__all__ = ["KernelMatrix", "call_table"]

WORDS = 32
"""Words of one call."""


@runtime_checkable
class KernelMatrix(Protocol):
    """A matrix that a single kernel multiplies. num_outputs: number of outputs after its gate."""

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_outputs(self) -> int: ...

    def call_into(self, x: torch.Tensor, out: torch.Tensor) -> KernelCall:
        """Return the call that multiplies x [T, I] into out [T, O], both contiguous."""
        ...


def call_table(
    gate_up: Sequence[KernelMatrix], down: Sequence[KernelMatrix], dtype: torch.dtype
) -> torch.Tensor:
    """Return int64 [2 · experts, WORDS], the two calls of each expert in turn. dtype: dtype of x
    and outputs."""
    pairs = zip(gate_up, down, strict=True)
    calls = [_call_of(matrix, dtype) for pair in pairs for matrix in pair]
    return torch.from_numpy(np.array(calls, np.uint64).view(np.int64))


def _call_of(matrix: KernelMatrix, dtype: torch.dtype) -> list[int]:
    """Return the words of a call: its kernel, the number of arguments, the indices of x, out and
    the number of rows among them, and the arguments."""
    x = torch.empty((2, matrix.num_inputs), dtype=dtype)
    out = torch.empty((2, matrix.num_outputs), dtype=dtype)
    call = matrix.call_into(x, out)
    two, one = _words(call), _words(matrix.call_into(x[:1], out[:1]))
    (num_rows,) = [i for i in range(len(two)) if two[i] != one[i]]
    places = (two.index(x.data_ptr()), two.index(out.data_ptr()), num_rows)
    head = [call.kernel, len(two), *places]
    assert len(head) + len(two) <= WORDS, "csrc/moe/experts.cpp has no room for this kernel's call"
    return head + two + [0] * (WORDS - len(head) - len(two))


def _words(call: KernelCall) -> list[int]:
    return np.frombuffer(call.arguments, np.uint64).tolist()
