"""`copy_blocks` by the C++ kernel (csrc/kv/copy_blocks.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.kv.copy_blocks`."""
    call = library.call

    def copy_blocks(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        if src.numel() == 0 or pages.numel() == 0:  # blocks may have no bytes
            return
        num_segments, num_blocks = pages.shape[:2]
        call(
            "copy_blocks",
            pages.data_ptr(),
            num_segments,
            num_blocks,
            pages[0, 0].numel() * pages.element_size(),
            src.data_ptr(),
            dst.data_ptr(),
            src.numel(),
        )

    return copy_blocks
