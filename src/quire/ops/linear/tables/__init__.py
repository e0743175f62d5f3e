"""y = x Wᵀ + b with weights stored as indices into tables.

`linear_tables(weight, bias=None, *, dtype=torch.float32, gate=None)` → `PackedMatrix`; weight:
`Tables`, [O, I] in blocks of a multiple of 4 inputs; bias [O]; gate as in `ops.linear.plain`. No
tensor is kept. A weight is table entry · scale, to which numbers may be added (`Tables.numbers` is
the definition), rounded once to `dtype`.

Called on x [..., I], it equals the provider's `linear` with those weights, to the bit. The weights
exist in `dtype` one panel of outputs at a time, while it is multiplied. So a row gets the same bits
whatever rows share the call and whatever the number of threads. `rows(ids)` gives the weights in
`dtype`.

Raises EngineError when the tensors do not fit together or a code has no entry.
"""

from __future__ import annotations

from quire.ops.linear.plain.contract import NO_PARTIAL, apply_linear_in
from quire.ops.linear.tables.cases import make_inputs
from quire.ops.linear.tables.contract import Added, Tables
from quire.ops.linear.tables.cpu import bind
from quire.ops.linear.tables.reference import PlainTableMatrix
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding

__all__ = ["OP", "Added", "Tables"]

OP = Op(
    name="linear_tables",
    reference=PlainTableMatrix,
    make_inputs=make_inputs,
    tolerance=rounding("products summed in another order", float32=2e-5),
    providers=cpu_providers(bind, lacks=NO_PARTIAL),
    apply=apply_linear_in,
)
