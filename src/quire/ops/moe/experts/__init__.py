"""Feed-forward networks of experts over the tokens that chose them.

`experts(gate_up, down, *, dtype, first=0)` → `ExpertLayers`; gate_up and down: a `PackedMatrix` for
each expert from `first` on, by any provider; the first is gated, [T, H] → [T, M] → [T, H]. dtype:
x's.

Called on x [T, H] with ids int32 [T, k] and weights float32 [T, k] it gives the sum over a token's
slots of weight · down(gate_up(x)) in the order of the slots: each network's output is rounded to
`dtype`, the sum is in float32, and is rounded once to `dtype`, or left in float32 where `out_dtype`
says so. Ids of other experts add nothing. shared [T, H], if given, is added last, times the sigmoid
of shared_logits, float32 [T, 1], if given.

A token's result depends neither on the other tokens of the call nor on threads, as far as the
matrices keep that promise.

Raises EngineError when the shapes break this contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.moe.experts.cases import make_inputs
from quire.ops.moe.experts.contract import ExpertLayers
from quire.ops.moe.experts.cpu import bind
from quire.ops.moe.experts.reference import PlainExperts
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding

__all__ = ["OP", "ExpertLayers"]


def _apply(
    experts: Callable[..., ExpertLayers],
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: list[PackedMatrix],
    down: list[PackedMatrix],
    **shared: Any,
) -> tuple[torch.Tensor, ...]:
    layers = experts(gate_up, down, dtype=x.dtype, first=1)
    wide = layers(x, ids, weights, out_dtype=torch.float32, **shared)
    return layers(x, ids, weights, **shared), wide


OP = Op(
    name="experts",
    reference=PlainExperts,
    make_inputs=make_inputs,
    tolerance=rounding("the same products; a polynomial exp in the gate of what is shared"),
    providers=cpu_providers(bind),
    apply=_apply,
)
