"""`draw` by the C++ kernel (csrc/sampling/draw.cpp, draw_row.h)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES
from quire.ops.sampling.draw.masks import check_masks

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.sampling.draw`."""
    call = library.call

    def draw(
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        sample_indices: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | None = None,
        *,
        masks: torch.Tensor | None = None,
        mask_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        columns = (temperature, top_k, top_p, min_p, seeds, sample_indices)
        if slots is not None:
            columns = tuple(column[slots] for column in columns)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        if masks is not None:
            check_masks(masks, logits.shape[1])
        token_ids = torch.empty_like(rows, dtype=torch.int32)
        call(
            "draw",
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            DTYPE_CODES[logits.dtype],
            rows.data_ptr(),
            len(rows),
            *(column.data_ptr() for column in columns),
            positions.data_ptr(),
            None if masks is None else masks.data_ptr(),
            None if mask_rows is None else mask_rows.data_ptr(),
            token_ids.data_ptr(),
        )
        return token_ids

    return draw
