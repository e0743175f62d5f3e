"""SiLU of the first half times the second half.

`silu_and_mul(x)` : [..., 2·I] → [..., I], newly allocated; x's last dimension contiguous.
silu(x) = x / (1 + exp(-x)) is rounded to the dtype before the product.
"""

from quire.ops.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.silu_and_mul.cpu import bind
from quire.ops.silu_and_mul.inputs import make_inputs
from quire.ops.silu_and_mul.reference import silu_and_mul

__all__ = ["OP"]

OP = Op(
    name="silu_and_mul",
    reference=silu_and_mul,
    make_inputs=make_inputs,
    tolerance=rounding("a polynomial exp; silu and the product round separately", float32=4e-6),
    providers=cpu_providers(bind),
)
