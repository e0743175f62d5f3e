"""Appends drawn tokens to their rows, and marks the tokens before as computed.

`append_tokens(slots, token_ids, num_computed, num_tokens, row_tokens, spare, positions) → None`

slots: int64 [R], distinct, except that the spare row may occur more than once. token_ids: integers
[R]. For all slots: num_computed, num_tokens int64 [N], row_tokens int32 [N, L]. With n =
num_tokens[slot]: row_tokens[slot, n] = token id, num_computed[slot] = n, num_tokens[slot] = n + 1.
A token id below 0 (the row has failed, and its next step is dropped) is stored as 0, so that an
embedding can read it. spare: the slot that pads steps and stays unchanged, -1 for none. positions:
int64 [R] or None; becomes the new num_tokens[slots], the places of the next tokens of the same
rows.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.rows.append_tokens.cases import make_inputs
from quire.ops.rows.append_tokens.cpu import bind
from quire.ops.rows.append_tokens.reference import append_tokens
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="append_tokens",
    reference=append_tokens,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.rows.append_tokens.triton:append_tokens"),
    ),
)
