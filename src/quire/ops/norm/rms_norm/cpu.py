"""`rms_norm` and `add_rms_norm` by the C++ kernel (csrc/norm/norms.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary
from quire.ops.norm.kernel import NormKernel

__all__ = ["bind", "bind_with_residual"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """`rms_norm` on `library`; contract in `quire.ops.norm.rms_norm`."""
    kernel = NormKernel(library, "rms_norm")

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return kernel.norm(x, (weight,), eps)

    return rms_norm


def bind_with_residual(
    library: NativeLibrary,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`add_rms_norm` on `library`; contract in `quire.ops.norm.rms_norm`."""
    kernel = NormKernel(library, "rms_norm")

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernel.add_and_norm(x, residual, (weight,), eps)

    return add_rms_norm
