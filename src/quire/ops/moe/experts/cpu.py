"""`experts` by the C++ kernel (csrc/moe/experts.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.moe.experts.calls import SizedMatrix, call_table
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
    """Return what a kernel computes if kernels compute all of the layers, else the reference."""
    check_layers(gate_up, down)
    table = call_table(library.team, gate_up, down, dtype)
    outer, inner = gate_up[0], down[0]
    if table is None or not isinstance(outer, SizedMatrix) or not isinstance(inner, SizedMatrix):
        return PlainExperts(gate_up, down, dtype=dtype, first=first)
    sizes = (outer.num_inputs, inner.num_inputs)
    return _CpuExperts(library, (*gate_up, *down), table, sizes, dtype, first)


class _CpuExperts:
    """Calls of the layers' own kernels, made by one kernel."""

    def __init__(
        self,
        library: NativeLibrary,
        matrices: Sequence[PackedMatrix],
        table: torch.Tensor,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        first: int,
    ) -> None:
        """sizes: inputs of the two layers."""
        self._call = library.call
        self._kept = matrices  # the calls name their memory
        self._table, self._dtype, self._first = table, dtype, first
        self._width, self._inner = sizes

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
