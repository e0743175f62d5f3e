"""Contract of `experts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.base.errors import EngineError
from quire.ops.linear.plain.contract import PackedMatrix

__all__ = ["ExpertLayers", "check_call", "check_layers"]


class ExpertLayers(Protocol):
    """The two layers of each expert of a range."""

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        shared: torch.Tensor | None = None,
        shared_logits: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [T, H], ids and weights [T, k] → [T, H], as the operation's contract says."""
        ...


def check_layers(gate_up: Sequence[PackedMatrix], down: Sequence[PackedMatrix]) -> None:
    """Raise EngineError unless each of the experts has two matrices."""
    if len(gate_up) != len(down) or not gate_up:
        raise EngineError(
            f"experts takes two layers of each, not {len(gate_up)} and {len(down)} of them."
        )


def check_call(
    x: torch.Tensor,
    dtype: torch.dtype,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_logits: torch.Tensor | None,
) -> None:
    """Raise EngineError unless shapes and dtypes follow the contract."""
    picks = (len(x), ids.shape[-1])
    if x.dim() != 2 or x.dtype != dtype:
        raise EngineError(f"experts takes rows of {dtype}, not {x.dtype}{list(x.shape)}.")
    if ids.shape != picks or weights.shape != picks or weights.dtype != torch.float32:
        raise EngineError(
            f"experts takes ids and float32 weights of {picks[0]} tokens, not {list(ids.shape)} "
            f"and {weights.dtype}{list(weights.shape)}."
        )
    if shared is not None and (shared.shape != x.shape or shared.dtype != dtype):
        raise EngineError(f"experts adds {dtype}{list(x.shape)}, not {list(shared.shape)}.")
    if shared_logits is not None and (
        shared is None or shared_logits.numel() != len(x) or shared_logits.dtype != torch.float32
    ):
        raise EngineError("experts takes a float32 logit for each token of what is shared.")
