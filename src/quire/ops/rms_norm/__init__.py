"""RMSNorm over the last dimension.

`rms_norm(x, weight, eps)` → tensor like x.

x: [..., N], last dimension contiguous. weight: [N]. The norm is in float32, rounded to x's dtype
and then multiplied by the weight, as the published Llama weights expect.
"""

from quire.ops.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.rms_norm.cpu import bind
from quire.ops.rms_norm.inputs import make_inputs
from quire.ops.rms_norm.reference import rms_norm
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="rms_norm",
    reference=rms_norm,
    make_inputs=make_inputs,
    tolerance=rounding("mean of squares summed in another order; weight product rounds twice"),
    providers=(*cpu_providers(bind), triton_provider("quire.ops.rms_norm.triton:rms_norm")),
)
