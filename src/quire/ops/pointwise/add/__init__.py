"""A sum: `add(x, y)` → x + y, newly allocated; both of one shape and dtype. Rounded once."""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.pointwise.add.cases import make_inputs
from quire.ops.pointwise.add.cpu import bind
from quire.ops.pointwise.add.reference import add
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="add",
    reference=add,
    make_inputs=make_inputs,
    tolerance=exact("one addition, rounded once"),
    providers=(*cpu_providers(bind), triton_provider("quire.ops.pointwise.add.triton:add")),
)
