"""Contract of `linear_by_head`: matrices of heads that are packed once and multiply many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from quire.base.errors import EngineError

__all__ = ["HeadMatrices", "apply_by_head", "check_rows", "check_weight"]


class HeadMatrices(Protocol):
    """W [H, O, I], in the provider's own layout."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write W[h] x[t, h] to out [T, H, O] for x [T, H, I] of one dtype."""
        ...


def check_weight(weight: torch.Tensor) -> None:
    """Raise EngineError unless weight is [H, O, I] with elements."""
    if weight.dim() != 3 or weight.numel() == 0:
        raise EngineError(f"linear_by_head takes a matrix for each head, not {list(weight.shape)}.")


def check_rows(x: torch.Tensor, out: torch.Tensor, shape: tuple[int, int, int]) -> None:
    """Raise EngineError unless x is [T, H, I] and out [T, H, O] for a weight of `shape`, with
    contiguous elements of one dtype."""
    heads, outputs, inputs = shape
    fits = x.shape[1:] == (heads, inputs) and out.shape == (len(x), heads, outputs)
    if not fits or x.dtype != out.dtype or x.stride(-1) != 1 or out.stride(-1) != 1:
        raise EngineError(
            f"linear_by_head with weights {list(shape)} was given {x.dtype}{list(x.shape)} for "
            f"{out.dtype}{list(out.shape)}, strides {x.stride()} and {out.stride()}."
        )


def apply_by_head(
    linear_by_head: Callable[[torch.Tensor], HeadMatrices],
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute a case of `Op`: pack, and multiply into `out`."""
    linear_by_head(weight)(x, out)
    return out
