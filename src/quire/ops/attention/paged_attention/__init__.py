"""Attention of a flat batch over the paged cache.

`paged_attention(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, window=None,
k_scale=None, v_scale=None, max_query_len=None, soft_cap=None, alibi_slopes=None, sinks=None,
key_bias=None, value_bias=None, last_key=None)`
→ [T, H, Dv] in q's dtype, newly allocated.

q: [T, H, Dk], any token stride, heads and dims contiguous. k_cache: [B, S, K, Dk], v_cache: [B, S,
K, Dv], one dtype; H is a multiple of K and query head h reads kv head h // (H / K). The kernels in
C++ take caches of one set of strides between blocks and tokens, tokens contiguous, and those in
Triton caches of one width D = Dk = Dv besides. V may be the first Dv elements of K (K = 1): one
plane that all heads share, as in multi-head latent attention (arXiv:2405.04434, section 2.1).
k_scale, v_scale: scales of an int8 cache, float32 [B, S, K] (`ops.kv.rope_and_write_kv`): its
numbers are element · scale. Of one plane, k_scale is [B, S, 2], of the elements of V and of the
others, and v_scale its first part. key_bias, value_bias: biases that an int8 cache lacks: a
`KeyBias` of K, float32 [K, Dv] of V; both are added to what is read. block_table: int32 [R, M];
entry i of row r is the block of its tokens i·S … (i+1)·S - 1. query_start_loc: int32 [R + 1]; row r
owns queries query_start_loc[r] … query_start_loc[r+1] - 1, which are the last ones of its
seq_lens[r] tokens (int32 [R]). A row without queries may have any length. max_query_len: most
queries of a row, as far as the host knows without asking the device; 1 promises that no row has
more, and then nothing is read on the host.

A query at position p sees the keys max(0, p - window + 1) … last_key, and nothing else is read:
memory beyond may hold NaN. window: counts back from the query, itself included; None: without end.
last_key: int32 [T], one for each query, non-decreasing within a row, at least p and below the row's
length; None: p, which is causal attention. With the end of the row for all, attention is
bidirectional; with the end of the span for those within, spans such as images are.

The score of head h for the query at p and the key at k is s = scale · q·k; then, where given,
soft_cap · tanh(s / soft_cap) (Gemma 2, arXiv:2408.00118, section 2), plus alibi_slopes[h] · (k - p)
(Press et al. 2022, arXiv:2108.12409, section 3). sinks[h] is one more score in the softmax of head
h, of a key without a value (Xiao et al. 2024, arXiv:2309.17453, section 3.3); with some, no
value_bias is given. alibi_slopes, sinks: float32 [H]. A row of no tokens with one query is padding:
Triton and the reference give zeros.

A token's result depends on its own keys alone: not on the batch, nor on how its prompt was cut.
Softmax and sums are in float32 (Vaswani et al. 2017, arXiv:1706.03762, equation 1; paging after
Kwon et al. 2023, arXiv:2309.06180).
"""

from dataclasses import replace

import torch

from quire.ops.attention.paged_attention.cases import WIDTHS, make_inputs
from quire.ops.attention.paged_attention.cpu import bind
from quire.ops.attention.paged_attention.reference import paged_attention
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, Tolerance, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["OP", "WIDTHS"]

_REASON = "online softmax in another order; its weights are rounded to the dtype before they meet V"
# Rounding moves a weight by half a unit in the last place, and an output by that of the largest V,
# which is about 4 in the inputs.
_WEIGHTS_ROUNDED = {
    torch.float32: Tolerance(2e-5, 2e-5, _REASON),
    torch.float16: Tolerance(2**-10, 4 * 2**-11, _REASON),
    torch.bfloat16: Tolerance(2**-7, 4 * 2**-8, _REASON),
}
_ORDER = rounding("online softmax sums in another order than the reference", float32=2e-5)
# csrc/attention/amx.h, csrc/attention/bf16.h
_BF16_WEIGHTS = {**_ORDER, torch.bfloat16: _WEIGHTS_ROUNDED[torch.bfloat16]}
_BF16_PLANES = {
    **_ORDER,
    torch.bfloat16: Tolerance(2**-7, 6 * 2**-8, _REASON + "; so are K and V of an int8 plane"),
}
_NOT_IN_TRITON = frozenset({"key_bias", "value_bias", "last_key", WIDTHS})
_OWN_TOLERANCES = {"cpu_amx": _BF16_PLANES, "cpu_avx512_bf16": _BF16_WEIGHTS}

OP = Op(
    name="paged_attention",
    reference=paged_attention,
    make_inputs=make_inputs,
    tolerance=_ORDER,
    providers=(
        *(
            replace(provider, tolerance=_OWN_TOLERANCES.get(provider.name))
            for provider in cpu_providers(bind)
        ),
        triton_provider(
            "quire.ops.attention.paged_attention.triton:paged_attention",
            _WEIGHTS_ROUNDED,
            _NOT_IN_TRITON,
        ),
    ),
)
