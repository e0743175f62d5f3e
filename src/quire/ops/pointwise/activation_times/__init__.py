"""A gate whose other factor is a separate tensor: `activation_times(x, up, kind)` → activation(x) ·
up, [T, N] newly allocated.

x, up: [T, N], one dtype, contiguous elements, any row strides. kind: one of
`ops.pointwise.activation`, or sigmoid; ConfigError for others. Computed in float32, rounded once.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.pointwise.activation_times.cpu import bind
from quire.ops.pointwise.activation_times.reference import activation_times, make_inputs

__all__ = ["OP"]

OP = Op(
    name="activation_times",
    reference=activation_times,
    make_inputs=make_inputs,
    tolerance=rounding("a polynomial exp, erf or tanh, then a product", float32=4e-6),
    providers=cpu_providers(bind),
)
