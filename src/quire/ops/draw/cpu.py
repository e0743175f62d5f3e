"""`draw` by the C++ kernel (csrc/draw.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native import NativeLibrary

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.draw`."""
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
    ) -> torch.Tensor:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        token_ids = torch.empty_like(rows)
        call(
            "draw",
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            rows.data_ptr(),
            len(rows),
            temperature.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            min_p.data_ptr(),
            seeds.data_ptr(),
            sample_indices.data_ptr(),
            positions.data_ptr(),
            token_ids.data_ptr(),
        )
        return token_ids

    return draw
