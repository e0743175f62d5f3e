"""Store K and V of this step's tokens into the paged cache.

`write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale=None, v_scale=None) → None`

k, v: [T, K, D], any token stride, heads and dims contiguous. k_cache, v_cache: [B, S, K, D], one
dtype and strides, tokens contiguous. slot_mapping: int64 [T], block · S + offset; a negative slot
stores nothing (padding). Slots of one call are distinct.

An int8 cache has scales, float32 [B, S, K], and holds each head of a token symmetrically: scale =
max |x| / 127, element = x / scale rounded to the nearest even. A scale below the smallest normal
float is 0 with elements 0; if a number of the head is not finite, its scale is NaN and its elements
are 0, so that whoever reads it gets NaN.
"""

from quire.ops.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.write_kv.cpu import bind
from quire.ops.write_kv.inputs import make_inputs
from quire.ops.write_kv.reference import write_kv

__all__ = ["OP"]

OP = Op(
    name="write_kv",
    reference=write_kv,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=cpu_providers(bind),
)
