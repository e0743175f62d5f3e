"""y = x Wᵀ + b with weights of few bits in blocks and, inside, 8-bit activations.

`linear_blocks(weight, bias=None, *, dtype=torch.float32, gate=None, activation_bits=8)` →
`PackedMatrix`; weight: `Blocks` of one of the `BLOCK_KINDS`, [O, I]; bias [O]; gate as in
`ops.linear.plain`; activation_bits as in `linear_int8`. No tensor is kept. A weight is scale ·
factor · level + offset (`Blocks.numbers` is the definition). Scales and minima are kept in 16 bits
(`contract.pack_scales`), here and in every provider.

Called on x [..., I] it gives [..., O] in x's dtype or, if asked, in float32. Each group of a row of
x becomes 8-bit integers with one scale (`contract.quantize_groups`); the sum of a group's products
with levels is exact in 32 bits, and so is the sum of its integers; then in float32: both times that
scale, times scale and offset of the group, added in the order of the groups, times the power of two
of the output, plus bias. A row with NaN or infinity gives NaN, and no other row notices. A provider
gives a row the same bits whatever rows share the call and whatever the number of threads.
`rows(ids)` gives the weights, rounded once from float32 to `dtype`.

Raises EngineError when the tensors are not those of their kind or a code needs more bits.
"""

from __future__ import annotations

from quire.ops.linear.blocks.cases import make_inputs
from quire.ops.linear.blocks.contract import Blocks
from quire.ops.linear.blocks.cpu import bind
from quire.ops.linear.blocks.reference import linear_blocks
from quire.ops.linear.plain.contract import NO_PARTIAL, apply_linear_in
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding

__all__ = ["OP", "Blocks"]

OP = Op(
    name="linear_blocks",
    reference=linear_blocks,
    make_inputs=make_inputs,
    tolerance=rounding("the same integers; a product and its sum rounded once", float32=2e-5),
    providers=cpu_providers(bind, lacks=NO_PARTIAL),
    apply=apply_linear_in,
)
