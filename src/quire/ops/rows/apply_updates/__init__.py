"""Sets single words of a device's state with one kernel.

`apply_updates(state, indices, values) → None`

state: int32 [W], contiguous. indices, values: int32 [N]: state[indices[i]] = values[i]. Equal
indices have equal values, so their order does not matter.
"""

from quire.ops.operation import Op, exact
from quire.ops.rows.apply_updates.cases import make_inputs
from quire.ops.rows.apply_updates.reference import apply_updates
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="apply_updates",
    reference=apply_updates,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=(triton_provider("quire.ops.rows.apply_updates.triton:apply_updates"),),
)
