"""`norm_rows` by the C++ kernel (csrc/norm/norms.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import row_norm_arguments

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.norm.norm_rows`."""
    call = library.call

    def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        arguments = row_norm_arguments(x, weight, eps)
        if len(x):
            call("norm_rows", *arguments)

    return norm_rows
