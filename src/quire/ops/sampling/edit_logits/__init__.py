"""Rows of logits with the edits of their requests: biases, bans, and penalties counted from the
history.

`edit_logits(logits, rows, slots, row_tokens, num_prompt, num_tokens, penalties, bias_start,
bias_ids, bias_values, allowed_start, allowed_ids, ban_start, bans, words) → edited`

logits: float32, float16 or bfloat16 [N, V]. rows, slots: int64 [E], the row of logits and the slot
with the history of each edited row. For all slots: row_tokens int32 [S, L], num_prompt and
num_tokens int64 [S]; a row's output is row_tokens[slot, num_prompt : num_tokens]. edited: float32
[E, V], newly allocated.

The edits of row e are entries [start[e], start[e + 1]) of each list (starts int32 [E + 1]), in the
order of application. bias_ids int32, bias_values float32 [B]: added to the logit; an id once per
row. allowed_ids int32 [A]: all others are banned, unless the list is empty. bans int32 [M, 4],
(token, minimum, first, length): with length < 0 the token is banned while the output has fewer than
`minimum` tokens; otherwise while it ends with words[first : first + length], int32. penalties
float64 [E, 3], repetition, presence, frequency: the logit of a token in prompt or output is divided
by the first if it is positive, otherwise multiplied; then frequency · occurrences + presence is
subtracted from that of a token in the output (sources in `quire.compute.sampling.edits`). A banned
token has the logit -inf. Ids in lists are within the vocabulary; other ids of the history are
ignored.
"""

from quire.ops.operation import Op, exact
from quire.ops.sampling.edit_logits.cases import make_inputs
from quire.ops.sampling.edit_logits.reference import edit_logits
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="edit_logits",
    reference=edit_logits,
    make_inputs=make_inputs,
    tolerance=exact("the same few roundings of each logit, in the same order"),
    providers=(triton_provider("quire.ops.sampling.edit_logits.triton:edit_logits"),),
)
