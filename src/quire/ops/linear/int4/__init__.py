"""y = x (scale · (weight - zero))ᵀ + b with 4-bit weights in groups and, inside, 8-bit activations.

`linear_int4(weight, scale, zero=None, bias=None, *, dtype=torch.float32, gate=None, rotation=1,
activation_bits=8)` → `PackedMatrix`; weight uint8 [O, I] with values 0 to 15, one per byte; scale
float32 [O, I / G] for a group size G of 32, 64 or 128, told from the shapes; zero uint8 [O, I / G],
0 to 15, or None for 8 everywhere; bias [O]; gate as in `ops.linear.plain`; rotation as in
`linear_int8`. No tensor is kept. Scales are kept in 16 bits (`contract.pack_scale`), here and in
every provider.

Called on x [..., I] it gives [..., O] in x's dtype or, if asked, in float32. Each row of x is
rotated and becomes 8-bit integers with one scale (`linear_int8.activations.quantize_rows`); the sum
of a group is exact in 32 bits; then in float32: the sums times their scales added in the order of
the groups, times the scale of the row, times the power of two of the output, plus bias. A row with
NaN or infinity gives NaN, and no other row notices. A provider gives a row the same bits whatever
rows share the call and whatever the number of threads. `rows(ids)` gives scale · (weight - zero),
rotated back, rounded once from float32 to `dtype`. As a `PartialMatrix`, which a provider may lack,
its partial sums are the float32 sums of its groups times the power of two of the output; those of a
cut matrix are added in another order than the whole adds them. activation_bits has
the meaning of that in `linear_int8`.

Raises EngineError when the shapes break this contract or a value needs more than 4 bits.
Groups along the inputs: ZeroQuant (Yao et al., 2022), section 4.1; 4-bit weights with zero points:
GPTQ (Frantar et al., 2023), section 4.
"""

from __future__ import annotations

from quire.ops.linear.int4.cases import make_inputs
from quire.ops.linear.int4.cpu import bind
from quire.ops.linear.int4.reference import linear_int4
from quire.ops.linear.plain.contract import NO_GATE, NO_PARTIAL, apply_linear_in
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="linear_int4",
    reference=linear_int4,
    make_inputs=make_inputs,
    tolerance=rounding("the same integers; a product and its sum rounded once", float32=2e-5),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.linear.int4.triton:linear_int4", lacks=NO_GATE | NO_PARTIAL),
    ),
    apply=apply_linear_in,
)
