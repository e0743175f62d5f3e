"""The gate of a gated MLP: an activation of the first half times the second half.

`activation_and_mul(x, kind)` : [..., 2·I] → [..., I], newly allocated; x's last dimension
contiguous. kind and its errors as in `quire.ops.activation`. Computed in float32, rounded once.
"""

from quire.ops.activation.cpu import bind_with_mul
from quire.ops.activation_and_mul.inputs import make_inputs
from quire.ops.activation_and_mul.reference import activation_and_mul
from quire.ops.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="activation_and_mul",
    reference=activation_and_mul,
    make_inputs=make_inputs,
    tolerance=rounding("a polynomial exp, erf or tanh, then a product", float32=4e-6),
    providers=(
        *cpu_providers(bind_with_mul),
        triton_provider("quire.ops.activation.triton:activation_and_mul"),
    ),
)
