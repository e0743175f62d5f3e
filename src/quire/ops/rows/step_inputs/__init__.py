"""Inputs of a step of rows with any number of tokens, gathered out of the persistent rows.

`step_inputs(slots, query_start_loc, num_computed, row_tokens, row_blocks, block_size, token_ids,
positions, seq_lens, slot_mapping, block_table) → None`

slots: int64 [R], row i of the step is in slots[i] and computes its tokens from
num_computed[slots[i]] on. query_start_loc: int32 [R + 1], where they stand in the step; each row
has one at least. Of all slots: num_computed int64 [N], row_tokens int32 [N, L], row_blocks int32
[N, M]. Written, as a model takes them: token_ids int32 [T], positions int64 [T], slot_mapping int64
[T], seq_lens int32 [R], and of block_table int32 [R, M] the entries up to the last token's block.
All are contiguous. T ≥ query_start_loc[R]; tokens from there on are padding: each is the first
token of the spare row, slot N - 1.
"""

from quire.ops.operation import Op, exact
from quire.ops.rows.step_inputs import numpy_rows
from quire.ops.rows.step_inputs.cases import make_inputs
from quire.ops.rows.step_inputs.reference import step_inputs
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="step_inputs",
    reference=step_inputs,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=(
        triton_provider("quire.ops.rows.step_inputs.triton:step_inputs"),
        numpy_rows.PROVIDER,
    ),
)
