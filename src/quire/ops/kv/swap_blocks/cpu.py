"""`swap_blocks` by the C++ kernel (csrc/cache.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.kv.swap_blocks`."""
    call = library.call

    def swap_blocks(
        source: torch.Tensor, target: torch.Tensor, src: torch.Tensor, dst: torch.Tensor
    ) -> None:
        if src.numel() == 0:
            return
        num_segments, num_blocks = source.shape[:2]
        call(
            "swap_blocks",
            source.data_ptr(),
            num_blocks,
            target.data_ptr(),
            target.shape[1],
            num_segments,
            source[0, 0].numel() * source.element_size(),
            src.data_ptr(),
            dst.data_ptr(),
            src.numel(),
        )

    return swap_blocks
