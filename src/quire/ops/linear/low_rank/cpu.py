"""`low_rank` by the C++ kernels (csrc/lora/low_rank.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.linear.low_rank.tables import LowRankTables
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, input_rows

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.linear.low_rank`."""
    call = library.call

    def low_rank(
        y: torch.Tensor,
        x: torch.Tensor,
        slots: torch.Tensor,
        tables: LowRankTables,
        of_all_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        adapters, parts, rank, inputs = tables.a.shape
        rows, outputs = y.shape
        x, code = input_rows(x, inputs), DTYPE_CODES[tables.a.dtype]
        if y.dtype != tables.a.dtype or x.dtype != y.dtype or y.stride(1) != 1 or len(x) != rows:
            raise EngineError(
                f"low_rank takes rows of {tables.a.dtype}, as many of x as of y, not "
                f"{x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}."
            )
        if outputs != tables.b.shape[2] or slots.shape != (rows,) or not slots.is_contiguous():
            raise EngineError(
                f"low_rank takes {tables.b.shape[2]} outputs and a slot for each row, not "
                f"{list(y.shape)} and {list(slots.shape)}."
            )
        if rows == 0:
            return
        t = torch.empty((rows, parts * rank), dtype=torch.float32)
        where, ranks = slots.data_ptr(), tables.ranks.data_ptr()
        call(
            "low_rank_shrink", x.data_ptr(), x.stride(0), where, tables.a.data_ptr(), ranks,
            t.data_ptr(), rows, inputs, adapters, parts, rank, code,
        )  # fmt: skip
        if of_all_ranks is not None:
            t = of_all_ranks(t)
        call(
            "low_rank_expand", t.data_ptr(), where, tables.b.data_ptr(), ranks,
            tables.scales.data_ptr(), tables.ends.data_ptr(), y.data_ptr(), y.stride(0), rows,
            outputs, adapters, parts, rank, code,
        )  # fmt: skip

    return low_rank
