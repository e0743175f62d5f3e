"""Rows of a table: `embedding(token_ids, weight)`; ids [T] integers, weight [V, N] → [T, N]."""

from quire.ops.embedding.inputs import make_inputs
from quire.ops.embedding.reference import embedding
from quire.ops.operation import Op, exact

__all__ = ["OP"]

OP = Op(
    name="embedding",
    reference=embedding,
    make_inputs=make_inputs,
    tolerance=exact(),
)
