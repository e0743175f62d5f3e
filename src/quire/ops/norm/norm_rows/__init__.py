"""RMSNorm of whole rows, in place, such as all heads of q or k within a merged projection.

`norm_rows(x, weight, eps)`; x: [T, N], any row stride, the last dimension contiguous. weight: [N].
Norm and product with the weight are in float32 and rounded once (OLMo 2, arXiv:2501.00656, section
3.2).
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.norm.norm_rows.cpu import bind
from quire.ops.norm.norm_rows.reference import make_inputs, norm_rows
from quire.ops.operation import Op, rounding

__all__ = ["OP"]

OP = Op(
    name="norm_rows",
    reference=norm_rows,
    make_inputs=make_inputs,
    tolerance=rounding("mean of squares summed in another order"),
    providers=cpu_providers(bind),
)
