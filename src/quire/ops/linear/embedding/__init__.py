"""Rows of a table.

`embedding(ids, weight, offset=0)` → weight[ids + offset], [T, N], newly allocated. ids: [T]
integers; weight: [V, N], contiguous. No memory outside the table is read. An id outside of it
raises IndexError with torch on the CPU and EngineError with the C++ kernels. Triton cannot raise:
its row is NaN, so only that request fails.
"""

from quire.ops.linear.embedding.cases import make_inputs
from quire.ops.linear.embedding.cpu import bind
from quire.ops.linear.embedding.reference import embedding
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="embedding",
    reference=embedding,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.linear.embedding.triton:embedding"),
    ),
)
