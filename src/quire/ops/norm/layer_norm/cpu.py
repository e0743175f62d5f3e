"""`layer_norm` and `add_layer_norm` by the C++ kernel (csrc/norm/norms.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary
from quire.ops.norm.kernel import NormKernel

__all__ = ["bind", "bind_with_residual"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """`layer_norm` on `library`; contract in `quire.ops.norm.layer_norm`."""
    kernel = NormKernel(library, "layer_norm")

    def layer_norm(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return kernel.norm(x, (weight, bias), eps)

    return layer_norm


def bind_with_residual(
    library: NativeLibrary,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`add_layer_norm` on `library`; contract in `quire.ops.norm.layer_norm`."""
    kernel = NormKernel(library, "layer_norm")

    def add_layer_norm(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernel.add_and_norm(x, residual, (weight, bias), eps)

    return add_layer_norm
