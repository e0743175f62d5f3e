"""Columns in another order: `take_columns(x, order)`, x [..., N], order [M] int64 of column numbers
→ [..., M], newly allocated. Raises EngineError for a column that does not exist."""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.pointwise.take_columns.cases import make_inputs
from quire.ops.pointwise.take_columns.cpu import bind
from quire.ops.pointwise.take_columns.reference import take_columns

__all__ = ["OP"]

OP = Op(
    name="take_columns",
    reference=take_columns,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=cpu_providers(bind),
)
