"""Experts one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.moe.experts.contract import check_call, check_layers

__all__ = ["PlainExperts"]


class PlainExperts:
    """`ExpertLayers` over matrices of any provider."""

    def __init__(
        self,
        gate_up: Sequence[PackedMatrix],
        down: Sequence[PackedMatrix],
        *,
        dtype: torch.dtype,
        first: int = 0,
    ) -> None:
        check_layers(gate_up, down)
        self._layers = list(zip(gate_up, down, strict=True))
        self._dtype, self._first = dtype, first

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
        check_call(x, self._dtype, ids, weights, shared, shared_logits)
        outputs = x.new_zeros((*ids.shape, x.shape[1]))
        for expert in ids.unique().tolist():
            index = expert - self._first
            if 0 <= index < len(self._layers):
                gate_up, down = self._layers[index]
                tokens, slots = (ids == expert).nonzero(as_tuple=True)
                outputs[tokens, slots] = down(gate_up(x[tokens]))
        own = (ids >= self._first) & (ids < self._first + len(self._layers))
        factors = torch.where(own, weights, 0.0)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for slot in range(ids.shape[1]):
            total += factors[:, slot, None] * outputs[:, slot].float()
        if shared is not None:
            gate = 1.0 if shared_logits is None else shared_logits.view(-1, 1).sigmoid()
            total += gate * shared.float()
        return total.to(out_dtype or x.dtype)
