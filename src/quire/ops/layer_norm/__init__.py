"""LayerNorm over the last dimension.

`layer_norm(x, weight, bias, eps)` → tensor like x. x: [..., N]. weight, bias: [N] or None, of x's
dtype. Computed in float32, rounded once.
"""

from quire.ops.cpu_provider import cpu_providers
from quire.ops.layer_norm.cpu import bind
from quire.ops.layer_norm.inputs import make_inputs
from quire.ops.layer_norm.reference import layer_norm
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="layer_norm",
    reference=layer_norm,
    make_inputs=make_inputs,
    tolerance=rounding("mean and variance summed in another order", float32=4e-6),
    providers=(*cpu_providers(bind), triton_provider("quire.ops.layer_norm.triton:layer_norm")),
)
