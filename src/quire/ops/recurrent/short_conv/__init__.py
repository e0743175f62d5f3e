"""A causal convolution of each channel over the last tokens of its row, with a state in place of
the tokens before a step:

`short_conv(x, weight, bias, states, read, write, slots, starts, num_computed, gated) → [T, E]`

gated: between two gates (LFM2, arXiv:2511.23404), x [T, 3 · E] with B, C and v of each token, and
u = B · v; else x [T, E] is u, and SiLU follows (Gated DeltaNet, arXiv:2412.06464). x: row after
row, of any row stride. weight [L, E], the last tap for the token itself. bias: [E] or None. With u
before the step from the state, and y = bias + Σ_k weight[k] · u[t - L + 1 + k], the result is C · y
or silu(y). Each product, and y, is rounded to x's dtype.

slots int64 [R]: slots of the rows. starts int32 [R + 1]: beginnings of their tokens. For all slots:
read, write, num_computed int64 [S]. states [P, (L - 1) · E], of any stride between places, in x's
dtype: place read[slot] has the last L - 1 values of u before the step, oldest first; it is not read
if num_computed[slot] is 0, where they are zeros. Place write[slot] receives those after it. The two
differ, so the step can be computed again.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.recurrent.short_conv.cases import make_inputs
from quire.ops.recurrent.short_conv.cpu import bind
from quire.ops.recurrent.short_conv.reference import short_conv

__all__ = ["OP"]

OP = Op(
    name="short_conv",
    reference=short_conv,
    make_inputs=make_inputs,
    tolerance=rounding("a sum of a few products, with and without fused additions"),
    providers=cpu_providers(bind),
)
