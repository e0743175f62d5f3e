"""y = x Wᵀ + b over weights that are packed once.

`linear(weight, bias=None, *, gate=None)` → `PackedMatrix`; weight [O, I] and bias [O] of one
dtype, not kept. Called on x [..., I] it gives [..., O] in x's dtype or, if asked, in float32; with
the name of an activation as `gate`, [..., O / 2]: to the bit what the provider's
`activation_and_mul` makes of those. `rows(ids)` gives rows of the weight back. Sums are in float32.
A provider for CPUs gives a row the same bits whatever rows share the call, and whatever the number
of threads; so does `triton_invariant` on GPUs.

Raises EngineError when the shapes break this contract.
"""

from __future__ import annotations

from dataclasses import replace

from quire.ops.linear.plain.cases import make_inputs
from quire.ops.linear.plain.contract import NO_GATE, PackedMatrix, PartialMatrix, apply_linear
from quire.ops.linear.plain.cpu import bind
from quire.ops.linear.plain.gpu_measured import MEASURED
from quire.ops.linear.plain.reference import PlainMatrix
from quire.ops.linear.plain.vendor import VENDOR
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["INVARIANT", "OP", "PackedMatrix", "PartialMatrix"]

INVARIANT = replace(
    triton_provider("quire.ops.linear.plain.triton:invariant_linear", lacks=NO_GATE),
    name="triton_invariant",
)
"""Chosen only on request: many rows take longer than with the vendor's product."""

OP = Op(
    name="linear",
    reference=PlainMatrix,
    make_inputs=make_inputs,
    tolerance=rounding("products summed in another order", float32=2e-5),
    providers=(
        *cpu_providers(bind),
        replace(MEASURED, lacks=NO_GATE),
        replace(VENDOR, lacks=NO_GATE),
        triton_provider("quire.ops.linear.plain.triton:linear", lacks=NO_GATE),
        INVARIANT,
    ),
    apply=apply_linear,
)
