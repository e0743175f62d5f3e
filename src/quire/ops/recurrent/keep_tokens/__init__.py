"""Copies the tokens of some rows of a batch to where the next steps do not overwrite them:

`keep_tokens(x, kept, slots, starts, keep) → None`

x [T, W]: row after row, of any stride between tokens. slots int64 [R]: slots of the rows. starts
int32 [R + 1]: beginnings of their tokens. keep: int64, for all slots: place of a row's first token
in kept [K, W], which is of x's dtype and of any stride between tokens; the row's others follow it.
-1 for a row that is not kept. EngineError for a row that has no room there.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.recurrent.keep_tokens.cases import make_inputs
from quire.ops.recurrent.keep_tokens.cpu import bind
from quire.ops.recurrent.keep_tokens.reference import keep_tokens

__all__ = ["OP"]

OP = Op(
    name="keep_tokens",
    reference=keep_tokens,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=cpu_providers(bind),
)
