"""y = x (scale · weight)ᵀ + b with 8-bit weights and, inside, 8-bit activations.

`linear_int8(weight, scale, bias=None, *, dtype=torch.float32, gate=None, rotation=1,
activation_bits=8)` → `PackedMatrix`; weight int8 [O, I] with I ≤ 131,072, scale float32 [O] (one
per output), bias [O], gate as in `quire.ops.linear.plain`; rotation: 1 for none, or a power of two
from 16 on, the inputs of a block that is rotated (`ops.linear.rotate`); activation_bits: 8 or 16.
No tensor is kept.

Called on x [..., I] it gives [..., O] in x's dtype or, if asked, in float32. Each row of x is
rotated in float32, so the weight is that of rotated inputs: a matrix W is given as rotate(W) /
rotation, whose products are those of W. Then it becomes 8-bit integers with one scale
(`activations.quantize_rows`); products are exact in 32 bits; then in float32, in this order,
(integer · scale of the row) · scale + bias. A row with NaN or infinity gives NaN, and no other row
notices. A provider gives a row the same bits whatever rows share the call and whatever the number
of threads. `rows(ids)` gives scale · weight, rotated back, rounded once from float32 to `dtype`. As
a `PartialMatrix`, which a provider may lack, its partial sums are the exact int32 products, so that
those of a cut matrix add up to those of the whole.

With 16 `activation_bits`, activations keep their dtype. The matrix equals the provider's `linear`,
to the bit, with weights rounded once to `dtype`. Where inputs are rotated, rows of x are rotated in
float32, divided by `rotate.rotation_part`, and rounded to their dtype; their weights are scale ·
weight times that part. It is no `PartialMatrix`, since `PlainPartial` serves it.

Raises EngineError when the shapes break this contract.
Per-token activations: ZeroQuant (Yao et al., 2022), section 4.1; why only scales of rows and of
outputs can wait until the integer product is done: SmoothQuant (Xiao et al., 2023), section 2.
"""

from __future__ import annotations

from quire.ops.linear.int8.cases import make_inputs
from quire.ops.linear.int8.cpu import bind
from quire.ops.linear.int8.reference import linear_int8
from quire.ops.linear.plain.contract import NO_GATE, NO_PARTIAL, apply_linear_in
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="linear_int8",
    reference=linear_int8,
    make_inputs=make_inputs,
    tolerance=rounding(
        "the same integers, scaled in the same order; of a gate a polynomial exp", float32=4e-6
    ),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.linear.int8.triton:linear_int8", lacks=NO_GATE | NO_PARTIAL),
    ),
    apply=apply_linear_in,
)
