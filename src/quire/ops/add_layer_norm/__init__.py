"""Residual addition, then LayerNorm of the sum.

`add_layer_norm(x, residual, weight, bias, eps)` → (normed, total), both like x and newly allocated;
total = x + residual rounded to the dtype, normed = `layer_norm(total, …)`.

x, residual: [..., N], last dimension contiguous. weight, bias: [N] or None.
"""

from quire.ops.add_layer_norm.inputs import make_inputs
from quire.ops.add_layer_norm.reference import add_layer_norm
from quire.ops.cpu_provider import cpu_providers
from quire.ops.layer_norm.cpu import bind_with_residual
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="add_layer_norm",
    reference=add_layer_norm,
    make_inputs=make_inputs,
    tolerance=rounding("mean and variance summed in another order", float32=4e-6),
    providers=(
        *cpu_providers(bind_with_residual),
        triton_provider("quire.ops.layer_norm.triton:add_layer_norm"),
    ),
)
