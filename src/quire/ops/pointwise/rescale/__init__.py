"""A factor and a cap: `rescale(x, factor, cap)` makes x [..., N] x · factor, in place, and returns
it; with a cap, cap · tanh(x · factor / cap) (Gemma 2, arXiv:2408.00118, section 2). Computed in
float32 and rounded once; factor and cap > 0 (None: off) are numbers. Rows may have a stride."""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.pointwise.rescale.cpu import bind
from quire.ops.pointwise.rescale.reference import make_inputs, rescale

__all__ = ["OP"]

OP = Op(
    name="rescale",
    reference=rescale,
    make_inputs=make_inputs,
    tolerance=rounding("tanh of float32 by an approximation"),
    providers=cpu_providers(bind),
)
