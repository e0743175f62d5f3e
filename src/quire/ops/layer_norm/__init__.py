"""LayerNorm over the last dimension.

`layer_norm(x, weight, bias, eps)` → tensor like x. x: [..., N]. weight, bias: [N] or None.
"""

from quire.ops.layer_norm.inputs import make_inputs
from quire.ops.layer_norm.reference import layer_norm
from quire.ops.operation import Op, rounding

__all__ = ["OP"]

OP = Op(
    name="layer_norm",
    reference=layer_norm,
    make_inputs=make_inputs,
    tolerance=rounding("mean and variance summed in another order"),
)
