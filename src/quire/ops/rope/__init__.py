"""Rotary position embedding, in place.

`rope(q, k, positions, cos, sin, interleaved=False) → None`

q: [T, H, D] and k: [T, K, D], any token stride, heads and dims contiguous. positions: int64 [T].
cos, sin: float32 [P, R/2] by position; R ≤ D is the rotary size, dims R … D - 1 stay as they are.
Dim i is paired with i + R/2, or with interleaved=True dim 2i with 2i + 1. Computed in float32,
rounded once.
"""

from quire.ops.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.rope.cpu import bind
from quire.ops.rope.inputs import make_inputs
from quire.ops.rope.reference import rope

__all__ = ["OP"]

OP = Op(
    name="rope",
    reference=rope,
    make_inputs=make_inputs,
    tolerance=rounding("the two products of a rotation may be fused"),
    providers=cpu_providers(bind),
)
