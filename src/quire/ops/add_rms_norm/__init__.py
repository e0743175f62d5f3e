"""Residual addition, then RMSNorm of the sum: two reads and two writes instead of five and three.

`add_rms_norm(x, residual, weight, eps)` → (normed, total), both like x and newly
allocated; total = x + residual rounded to the dtype, normed = `rms_norm(total, …)`.

x, residual: [..., N], last dimension contiguous. weight: [N].
"""

from quire.ops.add_rms_norm.inputs import make_inputs
from quire.ops.add_rms_norm.reference import add_rms_norm
from quire.ops.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.rms_norm.cpu import bind_with_residual
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="add_rms_norm",
    reference=add_rms_norm,
    make_inputs=make_inputs,
    tolerance=rounding("mean of squares summed in another order; weight product rounds twice"),
    providers=(
        *cpu_providers(bind_with_residual),
        triton_provider("quire.ops.rms_norm.triton:add_rms_norm"),
    ),
)
