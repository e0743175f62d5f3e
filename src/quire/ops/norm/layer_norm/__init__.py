"""LayerNorm over the last dimension.

`layer_norm(x, weight, bias, eps)` → tensor like x. x: [..., N]. weight, bias: [N] or None, of x's
dtype. Computed in float32, rounded once.

Residual addition, then LayerNorm of the sum.

`add_layer_norm(x, residual, weight, bias, eps)` → (normed, total), both like x and newly allocated;
total = x + residual rounded to the dtype, normed = `layer_norm(total, …)`.

x, residual: [..., N], last dimension contiguous. weight, bias: [N] or None.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.norm.layer_norm.cases import make_inputs, make_inputs_with_residual
from quire.ops.norm.layer_norm.cpu import bind, bind_with_residual
from quire.ops.norm.layer_norm.reference import add_layer_norm, layer_norm
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["ADD_OP", "OP"]

OP = Op(
    name="layer_norm",
    reference=layer_norm,
    make_inputs=make_inputs,
    tolerance=rounding("mean and variance summed in another order", float32=4e-6),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.norm.layer_norm.triton:layer_norm"),
    ),
)

ADD_OP = Op(
    name="add_layer_norm",
    reference=add_layer_norm,
    make_inputs=make_inputs_with_residual,
    tolerance=rounding("mean and variance summed in another order", float32=4e-6),
    providers=(
        *cpu_providers(bind_with_residual),
        triton_provider("quire.ops.norm.layer_norm.triton:add_layer_norm"),
    ),
)
