"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10), token after token, with a
matrix of each head for a state:

`gated_delta(x, gates, log_rates, bias, states, read, write, slots, starts, num_computed, keys,
in_turn) → [T, H · Dv]`

x [T, 2 · K · Dk + H · Dv]: q and k of K heads and v of H heads of each token, row after row; each
of K serves H / K adjacent ones of H, or if `in_turn` every K-th one. keys: K and Dk, a multiple of
4. gates [T, 2 · H], of any row
stride: b and a of each head. log_rates, bias: float32 [H]. With q and k divided by their lengths
(√(Σ x² + 1e-6)), q also by √Dk, β = sigmoid(b) and α = exp(-exp(log_rates) · softplus(a + bias)),
each token replaces S [Dk, Dv] by α S + k (β (v - α Sᵀ k))ᵀ and gives Sᵀ q, in x's dtype; all else
is float32.

slots, starts, read, write and num_computed are those of `quire.ops.recurrent.short_conv`. states
float32 [P, H · Dk · Dv], of any stride between places: S of each head by blocks of 16 columns, [Dv
/ 16, Dk, 16]. A sum goes by the same order for any number of tokens, so that cuts change no bit.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.recurrent.gated_delta.cases import make_inputs
from quire.ops.recurrent.gated_delta.cpu import bind
from quire.ops.recurrent.gated_delta.reference import gated_delta

__all__ = ["OP"]

OP = Op(
    name="gated_delta",
    reference=gated_delta,
    make_inputs=make_inputs,
    tolerance=rounding("sums over Dk in another order, carried from token to token", float32=2e-5),
    providers=cpu_providers(bind),
)
