"""`experts` by the C++ kernel (csrc/moe/experts.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.moe.experts.calls import KernelMatrix, call_table
from quire.ops.moe.experts.contract import ExpertLayers, check_call, check_layers
from quire.ops.moe.experts.reference import PlainExperts
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, input_rows, pointer

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., ExpertLayers]:
    """`experts` on `library`; contract in `quire.ops.moe.experts`."""
    return partial(_make, library)


def _make(
    library: NativeLibrary,
    gate_up: Sequence[PackedMatrix],
    down: Sequence[PackedMatrix],
    *,
    dtype: torch.dtype,
    first: int = 0,
) -> ExpertLayers:
    """Return the kernel's version if kernels compute all of the layers, otherwise the reference."""
    check_layers(gate_up, down)
    outer = [matrix for matrix in gate_up if isinstance(matrix, KernelMatrix)]
    inner = [matrix for matrix in down if isinstance(matrix, KernelMatrix)]
    if len(outer) + len(inner) < 2 * len(gate_up):
        return PlainExperts(gate_up, down, dtype=dtype, first=first)
    return _CpuExperts(library, outer, inner, dtype, first)


class _CpuExperts:
    """The calls of the layers' own kernels, made by one kernel."""

    def __init__(
        self,
        library: NativeLibrary,
        gate_up: Sequence[KernelMatrix],
        down: Sequence[KernelMatrix],
        dtype: torch.dtype,
        first: int,
    ) -> None:
        self._call = library.call
        self._kept = (gate_up, down)  # the calls refer to their memory
        self._table = call_table(gate_up, down, dtype)
        self._dtype, self._first = dtype, first
        self._width, self._inner = gate_up[0].num_inputs, down[0].num_inputs

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        shared: torch.Tensor | None = None,
        shared_logits: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        check_call(x, self._dtype, ids, weights, shared, shared_logits)
        x = input_rows(x, self._width)
        tokens, top_k = ids.shape
        y = torch.empty((tokens, self._width), dtype=out_dtype or x.dtype)
        outputs = torch.empty((tokens * top_k, self._width), dtype=x.dtype)
        shared = None if shared is None else shared.contiguous()
        self._call(
            "experts",
            x.data_ptr(),
            x.stride(0),
            ids.data_ptr(),
            weights.data_ptr(),
            self._table.data_ptr(),
            outputs.data_ptr(),
            pointer(shared),
            pointer(shared_logits),
            y.data_ptr(),
            tokens,
            top_k,
            self._first,
            len(self._table) // 2,
            self._width,
            self._inner,
            DTYPE_CODES[x.dtype],
            DTYPE_CODES[y.dtype],
        )
        return y
