"""The selective state of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060, section 2.2), by token, with a
matrix of each head for a state:

`ssd(x, dt, log_rates, bias, skip, states, read, write, slots, starts, num_computed, groups, limits)
→ [T, H · P]`

x [T, H · P + 2 · G · N]: x of H heads, B and C of G groups of each token, row after row; each group
serves H / G adjacent heads. groups: G and N, a multiple of 4. dt [T, H], of any row stride.
log_rates, bias, skip: float32 [H]. limits: the least and the most that a step may be. With Δ =
clamp(softplus(dt + bias)), each token replaces S [N, P] by exp(-Δ · exp(log_rates)) S + B (Δ x)ᵀ
and gives Sᵀ C + skip · x, in x's dtype; all else is float32.

slots, starts, read, write and num_computed are those of `quire.ops.recurrent.short_conv`. states
float32 [S, H · N · P], of any stride between places: S of each head by blocks of 16 columns, [P /
16, N, 16]. A sum goes by the same order for any number of tokens, so that cuts change no bit.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.recurrent.ssd.cases import make_inputs
from quire.ops.recurrent.ssd.cpu import bind
from quire.ops.recurrent.ssd.reference import ssd

__all__ = ["OP"]

OP = Op(
    name="ssd",
    reference=ssd,
    make_inputs=make_inputs,
    tolerance=rounding("sums over N in another order, carried from token to token", float32=2e-5),
    providers=cpu_providers(bind),
)
