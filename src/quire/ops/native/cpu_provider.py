"""Providers over the C++ kernels: one per instruction set, for each operation with a binding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from quire.base.errors import EngineError
from quire.base.platform import Platform
from quire.ops.compile import ISAS
from quire.ops.native.binding import NativeLibrary, load_native, native_unavailable
from quire.ops.native.team import ALONE, Team
from quire.ops.operation import FOR_CPUS, Provider

__all__ = [
    "CACHE_DTYPE_CODES",
    "DTYPE_CODES",
    "PANEL",
    "cpu_providers",
    "input_rows",
    "is_cpu_kernel",
    "isa_of",
    "packed_columns",
    "page_strides",
    "panel_width",
    "paired_rows",
    "pointer",
    "row_ids",
    "row_norm_arguments",
    "row_stride",
    "state_arguments",
    "strided_rows",
    "token_rows",
    "weight_code",
]

PANEL = 32
"""Output columns of the widest panel (csrc/linear/panels.h); packed widths are multiples of it."""

_PREFIX = "cpu_"

# enum DType of csrc/native/simd.h
DTYPE_CODES: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
)

# dispatch_cache of csrc/kv/int8_rows.h
CACHE_DTYPE_CODES: Mapping[torch.dtype, int] = MappingProxyType({**DTYPE_CODES, torch.int8: 3})


def cpu_providers(
    bind: Callable[[NativeLibrary], Callable[..., Any]], lacks: frozenset[str] = frozenset()
) -> tuple[Provider, ...]:
    """Return the providers `cpu_avx512`, `cpu_avx2`, … around `bind`, which makes the operation
    from a library. lacks: see `Provider`."""
    return tuple(
        Provider(
            name=_PREFIX + isa.name,
            unavailable=partial(_unavailable, isa.name),
            load=partial(_load, isa.name, bind),
            lacks=lacks,
        )
        for isa in ISAS
    )


def is_cpu_kernel(provider: str) -> bool:
    """Return True if `cpu_providers` made the provider of this name."""
    return provider.startswith(_PREFIX)


def isa_of(provider: str) -> str | None:
    """Return the instruction set of a provider that `cpu_providers` made, None for another one."""
    return provider.removeprefix(_PREFIX) if is_cpu_kernel(provider) else None


def panel_width(isa: str) -> int:
    """Output columns of a panel of an instruction set (csrc/linear/panels.h)."""
    return PANEL if isa != "avx2" else PANEL // 2


def packed_columns(outputs: int, gate: str | None) -> int:
    """Return the columns of the panels of a layer (csrc/pointwise/gate.h)."""
    halves = 1 if gate is None else 2
    return halves * -(-outputs // halves // PANEL) * PANEL


def weight_code(activation_bits: int, dtype: torch.dtype) -> int:
    """Return `weight_dtype` of a kernel (csrc/linear/widened): the type to which a matrix of
    integers is widened for activations of 16 bits; -1 for those of 8, which become integers."""
    return -1 if activation_bits == 8 else DTYPE_CODES[dtype]


def token_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, heads, D] itself if heads and dims are contiguous, otherwise a contiguous
    copy."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


def input_rows(x: torch.Tensor, depth: int) -> torch.Tensor:
    """Return x [..., I] as rows [T, I] with contiguous elements. Raises EngineError unless I is
    `depth`, which the kernels do not check."""
    if x.shape[-1] != depth:
        raise EngineError(f"A layer of {depth} inputs was given {list(x.shape)}.")
    rows = x if x.dim() == 2 else x.reshape(-1, depth)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def strided_rows(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int], tuple[int, int]]:
    """Return x as [outer, inner, N] rows: the tensor (a copy if it has no such view), sizes,
    strides."""
    if x.stride(-1) == 1:
        if x.dim() == 2:
            return x, (x.shape[0], 1), (x.stride(0), 0)
        if x.dim() == 3:
            return x, (x.shape[0], x.shape[1]), (x.stride(0), x.stride(1))
    x = x.contiguous()
    width = x.shape[-1]
    return x, (x.numel() // width, 1), (width, 0)


def paired_rows(
    x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return x and y as rows of one pair of sizes (`strided_rows`): tensors, sizes, strides of
    both. Raises EngineError unless they have one shape and dtype."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise EngineError(
            f"A sum takes two tensors of one shape and dtype, not {x.dtype}{list(x.shape)} and "
            f"{y.dtype}{list(y.shape)}."
        )
    x_rows, sizes, x_strides = strided_rows(x)
    y_rows, y_sizes, y_strides = strided_rows(y)
    if sizes != y_sizes:
        return paired_rows(x.contiguous(), y.contiguous())
    return x_rows, y_rows, sizes, x_strides, y_strides


def row_ids(ids: torch.Tensor) -> torch.Tensor:
    """Return ids in the form of the kernels (csrc/rows/ids.h): int32 or int64, contiguous."""
    return (ids if ids.dtype in (torch.int32, torch.int64) else ids.long()).contiguous()


def row_stride(out: torch.Tensor) -> int:
    """Return the stride of rows [T, N] that linear kernels write. Raises EngineError unless
    elements are contiguous."""
    if out.dim() != 2 or out.stride(1) != 1:
        raise EngineError(f"A layer cannot write into strides {out.stride()}.")
    return out.stride(0) if out.stride(0) != out.shape[1] else 0


def pointer(x: torch.Tensor | None) -> int | None:
    """Return the address of an optional argument."""
    return None if x is None else x.data_ptr()


def page_strides(cache: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Return the block and token strides of a cache [B, S, K, D], in elements, and of its
    scales."""
    block, token = cache.stride(0), cache.stride(1)
    if scales is None:
        return block, token, 0, 0
    return block, token, scales.stride(0), scales.stride(1)


def row_norm_arguments(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[int | float, ...]:
    """Return the arguments of a kernel that norms the rows of x [T, N], or the parts of them that a
    rank has. Raises EngineError if they do not fit together."""
    rows, width = x.shape
    if x.stride(1) != 1 or weight.shape != (width,) or weight.dtype != x.dtype:
        raise EngineError(
            f"norm_rows takes rows side by side and a weight for each element of them, not "
            f"{x.dtype}{list(x.shape)} with strides {x.stride()} and "
            f"{weight.dtype}{list(weight.shape)}."
        )
    code = DTYPE_CODES[x.dtype]
    return x.data_ptr(), x.stride(0), weight.data_ptr(), rows, width, eps, code


def state_arguments(
    states: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    starts: torch.Tensor,
    num_computed: torch.Tensor,
) -> tuple[int, ...]:
    """Return the arguments on states and rows of a kernel of csrc/recurrent, in its order. places:
    `read` and `write`; they and the others are those of `quire.ops.recurrent.short_conv`."""
    read, write = places
    return (
        states.data_ptr(),
        states.stride(0),
        read.data_ptr(),
        write.data_ptr(),
        slots.data_ptr(),
        len(slots),
        starts.data_ptr(),
        num_computed.data_ptr(),
    )


def _unavailable(isa: str, platform: Platform) -> str | None:
    return FOR_CPUS if platform.device != "cpu" else native_unavailable(isa, platform)


def _load(
    isa: str, bind: Callable[[NativeLibrary], Callable[..., Any]], team: Team = ALONE
) -> Callable[..., Any]:
    return bind(load_native(isa, team))
