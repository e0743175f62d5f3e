"""Log-probabilities of tokens by the model itself, and the most likely tokens.

`token_logprobs(logits, rows, token_ids, k) → (logprobs, ranks, top_ids, top_logprobs)`

logits: float32, float16 or bfloat16 [N, V], raw, the largest of each row finite. rows: int64 [M],
row of each token. token_ids: int32 [M]. k: number of most likely tokens to list; Triton
kernels list at most 1024.
logprobs: float32 [M], the token's logit less the logarithm of the sum of exp(logit) over its row.
ranks: int32 [M], 1 for the most likely; equal logits are ranked by token id. top_ids int32,
top_logprobs float32 [M, k]: best first; -1 and -inf after the last token whose logit is not -inf. A
negative token id, or a row without a finite largest logit, gives numbers that mean nothing.
"""

from __future__ import annotations

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, Tolerance
from quire.ops.random_tensors import DTYPES
from quire.ops.sampling.token_logprobs.cases import make_inputs
from quire.ops.sampling.token_logprobs.cpu import bind
from quire.ops.sampling.token_logprobs.reference import token_logprobs
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

_REASON = "sums of float32 against float64; results of up to 40 are rounded to float32 once more"

OP = Op(
    name="token_logprobs",
    reference=token_logprobs,
    make_inputs=make_inputs,
    tolerance={dtype: Tolerance(1e-6, 5e-6, _REASON) for dtype in DTYPES},
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.sampling.token_logprobs.triton:token_logprobs"),
    ),
)
