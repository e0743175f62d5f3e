"""Rows of a table.

`embedding(ids, weight, offset=0)` → weight[ids + offset], [T, N], newly allocated. ids: [T]
integers; weight: [V, N], contiguous. An id outside the table is an error of the provider's kind
(IndexError by torch, EngineError by the kernels), and nothing else is read.
"""

from quire.ops.cpu_provider import cpu_providers
from quire.ops.embedding.cpu import bind
from quire.ops.embedding.inputs import make_inputs
from quire.ops.embedding.reference import embedding
from quire.ops.operation import Op, exact

__all__ = ["OP"]

OP = Op(
    name="embedding",
    reference=embedding,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=cpu_providers(bind),
)
