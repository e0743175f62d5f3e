"""One pass over the rows between the projections of latent attention and its scores: the norm of
the latent vector, rotation, and the vector of each token into the paged cache.

`write_latent(queries, rotated, latent, weight, eps, positions, cos, sin, cache, slot_mapping,
scale=None) → None`

With C elements that keys and values are made of, and R rotated ones (DeepSeek-AI 2024,
arXiv:2405.04434, section 2.1):

- latent: [T, C + R], any token stride, changed in place. `rms_norm` with weight [C] over the first
  C elements, rotation of the last R, each rounded to the dtype. Dim i of those R is paired with
  i + R/2; cos and sin: float32 [P, R/2] by position, positions: int64 [T].
- That row into its slot of the cache [B, S, 1, C + R]. slot_mapping: int64 [T], block · S + offset;
  a negative slot stores nothing (padding). Slots of one call are distinct.
- rotated: [T, H · R], any token stride, not changed: the parts of the heads' queries that rotate.
  Their rotation becomes the last R elements of each head of queries [T, H, C + R], heads
  contiguous. The first C are left as they are.

scale: float32 [B, S, 2] of an int8 cache, of the C elements and of the R, each part in the form of
`rope_and_write_kv`: the norm bounds the one, and nothing the other. Caches in float8 are not
supported.
"""

from quire.ops.kv.write_latent.cases import make_inputs
from quire.ops.kv.write_latent.cpu import bind
from quire.ops.kv.write_latent.reference import write_latent
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding

__all__ = ["OP"]

OP = Op(
    name="write_latent",
    reference=write_latent,
    make_inputs=make_inputs,
    tolerance=rounding("mean of squares summed in another order", float32=4e-6),
    providers=cpu_providers(bind),
)
