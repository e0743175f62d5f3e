"""Times products of bfloat16 by the C++ kernels of each instruction set, to choose between them.
Never imports torch, so any process may choose.

Processor flags tell which kernels can run, not which are fast: on some processors VDPBF16PS takes
longer than the fused multiply-adds that it replaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np

from quire.base.platform import Platform
from quire.ops.compile import ISAS, maker
from quire.ops.native.binding import NativeLibrary, load_native, native_unavailable
from quire.ops.native.team import Team

__all__ = ["FEW_ROWS", "MANY_ROWS", "Product", "Seconds", "kernel_families", "time_kernels"]

FEW_ROWS, MANY_ROWS = 1, 32
"""Rows of one decoding sequence, and of several or of a prompt."""

Product = Literal["linear", "attention", "int8_attention"]
"""A linear layer, attention over a cache of bfloat16, and attention over one of 8 bits."""

Seconds = Mapping[str, tuple[float, float]]
"""Seconds of one call with FEW_ROWS and of one with MANY_ROWS, by instruction set."""

BUDGET_S = 0.018
"""Time for one product, so that two stay below 50 ms."""

# Source files of csrc in which the products are.
_UNITS: Mapping[Product, str] = MappingProxyType(
    {
        "linear": "linear_bf16",
        "attention": "paged_attention",
        "int8_attention": "paged_attention",
    }
)

LEAST_ROUNDS = 4
"""Fewest rounds, so that one interrupted call cannot decide."""

_DEPTH = 1024
_LEAST_BYTES, _MOST_BYTES = 2 * 2**20, 16 * 2**20
_UNKNOWN_L2 = 2**20
_BFLOAT16, _INT8, _UNGATED = 1, 3, -1  # as the kernels number them
_ONE, _SMALL = 0x3F80, 0x3C00  # 1 and 2**-7 in bfloat16

# Attention as in a model of the shape of Qwen3-0.6B.
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 16, 8, 128, 16
_NO_BIASES = (*(None,) * 4, *(0,) * 3, None)  # of K and of V (csrc/attention/paged_attention.cpp)
_OWN_POSITION = None  # as the last key of each query
_NO_SINKS = None
_NO_CAP, _NO_SLOPES = 0.0, None
_FEW_ROWS_SEE, _MANY_ROWS_SEE = 1024, 256

Call = Callable[[], object]


def kernel_families(product: Product, platform: Platform) -> tuple[str, ...]:
    """Return the instruction sets that run here and differ in their kernels of this product, best
    first by the processor's flags. The widest stands for several with the same kernel. Empty
    without compiled kernels."""
    found: dict[str, str] = {}
    for isa in ISAS:
        if native_unavailable(isa.name, platform) is None:
            found.setdefault(maker(isa, _UNITS[product]).name, isa.name)
    return tuple(found.values())


def time_kernels(
    product: Product, families: Sequence[str], num_threads: int, platform: Platform
) -> Seconds | None:
    """Return the shortest time of several calls, with kernels by turns. None if the budget is up
    before `LEAST_ROUNDS`: the machine is too slow or too busy."""
    team = Team(num_threads)
    libraries = {isa: load_native(isa, team) for isa in families}
    if product == "linear":
        return _time_by_turns(_linear_calls(libraries, num_threads, platform))
    is_int8 = product == "int8_attention"
    return _time_by_turns(_attention_calls(libraries, is_int8=is_int8))


def _time_by_turns(calls: Mapping[str, tuple[Call, Call]]) -> Seconds | None:
    end = time.perf_counter() + BUDGET_S
    rounds: list[dict[str, tuple[float, float]]] = []
    while time.perf_counter() < end:
        seconds: dict[str, tuple[float, float]] = {}
        for isa, (few, many) in calls.items():
            if time.perf_counter() < end:
                seconds[isa] = _seconds_of(few), _seconds_of(many)
        if len(seconds) == len(calls):
            rounds.append(seconds)
    counted = rounds[1:]  # the first call pays for page faults and the start of threads
    if len(counted) < LEAST_ROUNDS:
        return None
    return {
        isa: (min(each[isa][0] for each in counted), min(each[isa][1] for each in counted))
        for isa in calls
    }


def _seconds_of(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _linear_calls(
    libraries: Mapping[str, NativeLibrary], num_threads: int, platform: Platform
) -> dict[str, tuple[Call, Call]]:
    """Return a matrix larger than the second-level caches of all threads, up to `_MOST_BYTES`. All
    elements are equal, so it is packed for every kernel."""
    l2 = dict(platform.cpu.cache_bytes).get(2, _UNKNOWN_L2)
    size = min(max(l2 * num_threads * 3 // 2, _LEAST_BYTES), _MOST_BYTES)
    outputs = size // (_DEPTH * 2)
    weight = np.full((outputs, _DEPTH), _SMALL, np.uint16)
    x = np.full((MANY_ROWS, _DEPTH), _ONE, np.uint16)
    y = np.zeros((MANY_ROWS, outputs), np.uint16)

    def call(library: NativeLibrary, rows: int) -> None:
        library.call(
            "linear",
            x.ctypes.data,
            _DEPTH,
            weight.ctypes.data,
            None,
            y.ctypes.data,
            outputs,
            rows,
            outputs,
            _DEPTH,
            *(_BFLOAT16,) * 3,
            _UNGATED,
        )

    return _with_both_rows(libraries, call)


def _attention_calls(
    libraries: Mapping[str, NativeLibrary], *, is_int8: bool
) -> dict[str, tuple[Call, Call]]:
    """Return the arguments of a decoding row and a prefilling row, over 4 MiB and 1 MiB of keys and
    values, half as much in 8 bits."""
    width = _KV_HEADS * _HEAD_DIM
    q = np.full((MANY_ROWS, _HEADS, _HEAD_DIM), _ONE, np.uint16)
    out = np.empty_like(q)
    cache = np.full((2, _FEW_ROWS_SEE, width), 1 if is_int8 else _SMALL, np.uint16)
    if is_int8:
        cache = cache.astype(np.int8)
    scales = np.full((2, _FEW_ROWS_SEE, _KV_HEADS), 1.0, np.float32)
    table = np.arange(_FEW_ROWS_SEE // _BLOCK, dtype=np.int32)
    seen = {FEW_ROWS: _FEW_ROWS_SEE, MANY_ROWS: _MANY_ROWS_SEE}
    starts = {rows: np.array([0, rows], np.int32) for rows in seen}
    lengths = {rows: np.array([length], np.int32) for rows, length in seen.items()}

    def call(library: NativeLibrary, rows: int) -> None:
        library.call(
            "paged_attention",
            q.ctypes.data,
            cache[0].ctypes.data,
            cache[1].ctypes.data,
            scales[0].ctypes.data if is_int8 else None,
            scales[1].ctypes.data if is_int8 else None,
            out.ctypes.data,
            table.ctypes.data,
            starts[rows].ctypes.data,
            lengths[rows].ctypes.data,
            _HEADS * _HEAD_DIM,
            _BLOCK * width,
            width,
            _BLOCK * _KV_HEADS if is_int8 else 0,
            _KV_HEADS if is_int8 else 0,
            len(table),
            _BLOCK,
            1,
            _HEADS,
            _KV_HEADS,
            _HEAD_DIM,
            _HEAD_DIM,
            _KV_HEADS,
            _HEAD_DIM**-0.5,
            0,
            _BFLOAT16,
            _INT8 if is_int8 else _BFLOAT16,
            *_NO_BIASES,
            _OWN_POSITION,
            _NO_SINKS,
            _NO_CAP,
            _NO_SLOPES,
        )

    return _with_both_rows(libraries, call)


def _with_both_rows(
    libraries: Mapping[str, NativeLibrary], call: Callable[[NativeLibrary, int], None]
) -> dict[str, tuple[Call, Call]]:
    def bound(library: NativeLibrary) -> tuple[Call, Call]:
        return lambda: call(library, FEW_ROWS), lambda: call(library, MANY_ROWS)

    return {isa: bound(library) for isa, library in libraries.items()}
