"""Inputs of a decode step, gathered out of the persistent rows (`quire.compute.runner.rows`).

`decode_inputs(slots, num_computed, row_tokens, row_blocks, block_size, token_ids, positions,
seq_lens, slot_mapping, block_table) → None`

slots: int64 [R], row i of the step is in slots[i] and computes its token at num_computed[slots[i]].
Of all slots: num_computed int64 [N], row_tokens int32 [N, L], row_blocks int32 [N, M].
Written, as a model takes them: token_ids int32 [R], positions int64 [R], seq_lens int32 [R],
slot_mapping int64 [R], and of block_table int32 [R, M] the entries up to the token's block. All are
contiguous.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.rows.decode_inputs.cases import make_inputs
from quire.ops.rows.decode_inputs.cpu import bind
from quire.ops.rows.decode_inputs.reference import decode_inputs
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="decode_inputs",
    reference=decode_inputs,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.rows.decode_inputs.triton:decode_inputs"),
    ),
)
