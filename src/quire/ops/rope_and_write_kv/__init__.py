"""What stands between the qkv projection and attention, in one pass over its rows: norms of the
heads of q and k, rotation, K and V into the paged cache.

`rope_and_write_kv(qkv, num_heads, positions, cos, sin, k_cache, v_cache, slot_mapping,
k_scale=None, v_scale=None, q_weight=None, k_weight=None, eps=0.0) → None`

qkv: [T, (H + 2K)·D], H = num_heads, dims contiguous; q and k are changed in place, v stays. First
`rms_norm` over each head of q and k if weights [D] are given, then `rope` unless cos and sin are
None, then `write_kv`: shapes, rounding and bits are those of the three operations one after the
other.
"""

from quire.ops.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.rope_and_write_kv.cpu import bind
from quire.ops.rope_and_write_kv.inputs import make_inputs
from quire.ops.rope_and_write_kv.reference import rope_and_write_kv

__all__ = ["OP"]

OP = Op(
    name="rope_and_write_kv",
    reference=rope_and_write_kv,
    make_inputs=make_inputs,
    tolerance=rounding(
        "sums in another order; a norm rounded to the neighbour is then rotated", float32=4e-6
    ),
    providers=cpu_providers(bind),
)
