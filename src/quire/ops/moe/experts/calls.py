"""Calls of linear kernels as csrc/moe/experts.cpp makes them, for the rows of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from quire.ops.linear.plain.contract import IntoMatrix, PackedMatrix
from quire.ops.native.replay import KernelCall
from quire.ops.native.team import Team

__all__ = ["SizedMatrix", "call_table"]

WORDS, ARGUMENTS = 32, 27
"""Words of a call there, and arguments of a kernel that fit."""


@runtime_checkable
class SizedMatrix(IntoMatrix, Protocol):
    """`IntoMatrix` that tells its sizes. num_outputs: after its gate."""

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_outputs(self) -> int: ...


def call_table(
    team: Team, gate_up: Sequence[PackedMatrix], down: Sequence[PackedMatrix], dtype: torch.dtype
) -> torch.Tensor | None:
    """int64 [2 · experts, WORDS], the two calls of each expert in turn. None if some layer is not
    one call of a kernel of this team."""
    calls: list[list[int]] = []
    for pair in zip(gate_up, down, strict=True):
        for matrix in pair:
            words = _call_of(team, matrix, dtype)
            if words is None:
                return None
            calls.append(words)
    return torch.from_numpy(np.array(calls, np.uint64).view(np.int64))


def _call_of(team: Team, matrix: PackedMatrix, dtype: torch.dtype) -> list[int] | None:
    if not isinstance(matrix, SizedMatrix):
        return None
    rows = 2
    x = torch.empty((rows, matrix.num_inputs), dtype=dtype)
    y = torch.empty((rows, matrix.num_outputs), dtype=dtype)
    with team.recording(computes=False) as recorded:
        matrix.into(x, y)
        matrix.into(x[:1], y[:1])
    if len(recorded) != 2 or recorded[0].kernel != recorded[1].kernel:
        return None
    two, one = (_words(call) for call in recorded)
    if len(two) > ARGUMENTS:
        return None
    (num_rows,) = [i for i in range(len(two)) if two[i] != one[i]]
    places = (two.index(x.data_ptr()), two.index(y.data_ptr()), num_rows)
    head = [recorded[0].kernel, len(two), *places]
    return head + two + [0] * (WORDS - len(head) - len(two))


def _words(call: KernelCall) -> list[int]:
    return np.frombuffer(call.arguments, np.uint64).tolist()
