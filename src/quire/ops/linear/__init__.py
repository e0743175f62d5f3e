"""y = x Wᵀ + b.

`linear(x, weight, bias=None)` : x [..., I], weight [O, I], bias [O] → [..., O] in x's dtype.
"""

from quire.ops.linear.inputs import make_inputs
from quire.ops.linear.reference import linear
from quire.ops.operation import Op, rounding

__all__ = ["OP"]

OP = Op(
    name="linear",
    reference=linear,
    make_inputs=make_inputs,
    tolerance=rounding("products summed in another order", float32=2e-5),
)
