"""A matrix of its own for each head, packed once.

`linear_by_head(weight)` → `HeadMatrices`; weight [H, O, I] is not kept. Called with x [T, H, I] and
out [T, H, O] of one float dtype it sets out[t, h] = W[h] x[t, h]. Tokens and heads of both may have
any strides, elements are contiguous. Sums are in float32. A provider for CPUs gives a token the
same bits whatever tokens share the call, and whatever the number of threads, as in `linear`.

Raises EngineError when the shapes break this contract.
"""

from __future__ import annotations

from quire.ops.linear.by_head.cases import make_inputs
from quire.ops.linear.by_head.contract import HeadMatrices, apply_by_head
from quire.ops.linear.by_head.cpu import bind
from quire.ops.linear.by_head.reference import PlainHeadMatrices
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding

__all__ = ["OP", "HeadMatrices"]

OP = Op(
    name="linear_by_head",
    reference=PlainHeadMatrices,
    make_inputs=make_inputs,
    tolerance=rounding("products summed in another order", float32=2e-5),
    providers=cpu_providers(bind),
    apply=apply_by_head,
)
