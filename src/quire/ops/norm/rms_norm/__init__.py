"""RMSNorm over the last dimension.

`rms_norm(x, weight, eps)` → tensor like x.

x: [..., N], last dimension contiguous. weight: [N]. The norm is in float32, rounded to x's dtype
and then multiplied by the weight, as the published Llama weights expect.

Residual addition, then RMSNorm of the sum: two reads and two writes instead of five and three.

`add_rms_norm(x, residual, weight, eps)` → (normed, total), both like x and newly
allocated; total = x + residual rounded to the dtype, normed = `rms_norm(total, …)`.

x, residual: [..., N], last dimension contiguous. weight: [N].
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.norm.rms_norm.cases import make_inputs, make_inputs_with_residual
from quire.ops.norm.rms_norm.cpu import bind, bind_with_residual
from quire.ops.norm.rms_norm.reference import add_rms_norm, rms_norm
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["ADD_OP", "OP"]

OP = Op(
    name="rms_norm",
    reference=rms_norm,
    make_inputs=make_inputs,
    tolerance=rounding("mean of squares summed in another order; weight product rounds twice"),
    providers=(*cpu_providers(bind), triton_provider("quire.ops.norm.rms_norm.triton:rms_norm")),
)

ADD_OP = Op(
    name="add_rms_norm",
    reference=add_rms_norm,
    make_inputs=make_inputs_with_residual,
    tolerance=rounding("mean of squares summed in another order; weight product rounds twice"),
    providers=(
        *cpu_providers(bind_with_residual),
        triton_provider("quire.ops.norm.rms_norm.triton:add_rms_norm"),
    ),
)
