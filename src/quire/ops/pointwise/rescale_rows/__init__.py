"""A factor for each row, from a table: `rescale_rows(x, factors, index=None)` makes x [T, ...]
x[t] · factors[index[t]], in place, and returns it; without an index the first factor is for all.

x: contiguous rows with any stride. factors: [P], of x's dtype. index: [T], integers. Rounded once.
Raises EngineError for an index that the table does not have.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.pointwise.rescale_rows.cpu import bind
from quire.ops.pointwise.rescale_rows.reference import make_inputs, rescale_rows

__all__ = ["OP"]

OP = Op(
    name="rescale_rows",
    reference=rescale_rows,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=cpu_providers(bind),
)
