"""One pass over the rows between the qkv projection and attention: norms of the heads of q and k,
rotation, K and V into the paged cache.

`rope_and_write_kv(qkv, num_heads, positions, cos, sin, k_cache, v_cache, slot_mapping,
k_scale=None, v_scale=None, q_weight=None, k_weight=None, eps=0.0) → None`

qkv: [T, (H + 2K)·D], H = num_heads, any token stride, dims contiguous; q and k are changed in
place, v stays. In this order, each rounded to the dtype:

- `rms_norm` over each head of q and k, if weights [D] are given (both or none).
- Rotation, unless cos and sin are None: float32 [P, R/2] by position, R ≤ D the rotary size, dim i
  paired with i + R/2, dims R … D - 1 as they are. positions: int64 [T].
- K and V into their slots. k_cache, v_cache: [B, S, K, D], one dtype and strides, tokens
  contiguous. slot_mapping: int64 [T], block · S + offset; a negative slot stores nothing (padding).
  Slots of one call are distinct.

A cache in float8 (e4m3, e5m2) holds the nearest of its numbers, at most the largest, after a
division by its scales, if it has any, which stay; only the reference takes it.

An int8 cache has scales, float32 [B, S, K], and holds each head of a token symmetrically: scale =
max |x| / 127, element = x / scale rounded to the nearest even. A scale below the smallest normal
float is 0 with elements 0; if a number of the head is not finite, its scale is NaN and its elements
are 0, so that whoever reads it gets NaN.
"""

from quire.ops.kv.rope_and_write_kv.cases import make_inputs
from quire.ops.kv.rope_and_write_kv.cpu import bind
from quire.ops.kv.rope_and_write_kv.reference import rope_and_write_kv
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="rope_and_write_kv",
    reference=rope_and_write_kv,
    make_inputs=make_inputs,
    tolerance=rounding(
        "sums in another order; a norm rounded to the neighbour is then rotated", float32=4e-6
    ),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.kv.rope_and_write_kv.triton:rope_and_write_kv"),
    ),
)
