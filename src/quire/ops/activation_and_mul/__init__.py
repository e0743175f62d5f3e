"""The gate of a gated MLP: an activation of the first half times the second half.

`activation_and_mul(x, kind)` : [..., 2·I] → [..., I], newly allocated; x's last dimension
contiguous. kind and its errors as in `quire.ops.activation`; the activation is rounded to the dtype
before the product.
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
    tolerance=rounding(
        "a polynomial exp or erf; the activation and the product round separately", float32=4e-6
    ),
    providers=(
        *cpu_providers(bind_with_mul),
        triton_provider("quire.ops.activation.triton:activation_and_mul"),
    ),
)
