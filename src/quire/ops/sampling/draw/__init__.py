"""Draw tokens from rows of logits.

`draw(logits, rows, temperature, top_k, top_p, min_p, seeds, sample_indices, positions, slots=None,
*, masks=None, mask_rows=None) → token_ids`

logits: float32 or bfloat16 [N, V]. rows: int64 [R], which row of logits each draw is from.
temperature, top_p, min_p: float64 [R]. top_k: int64 [R]. top_k 0, top_p 1 and min_p 0 are off.
seeds: 64 bits as int64 [R]. sample_indices, positions: int64 [R], the sample's number and the
absolute position of the token that is drawn. slots: int64 [R] or None; with it, all parameters but
`rows` and `positions` are columns of every slot [S], and those of a draw are at its slot.
masks: words of 32 bits as int32 [M, ceil(V / 32)], M > 0, contiguous; bit i % 32 of word i // 32
lets token i be drawn. mask_rows: int64 [R], the mask of each draw, negative where there is none.
Both or neither. The logit of a token that a mask bans counts as -inf in all that follows.
token_ids: int32 [R]; -1 where a logit is NaN or the largest is not finite, banned ones included;
else -2 where a mask leaves no token with a finite logit.

At temperature 0 the token is the one with the largest logit, of equal ones that with the smallest
id; filters change nothing. Else a draw is argmax(z + Gumbel noise) over the candidates that top-k,
then top-p, then min-p leave (reference.py), z = (logit - largest) / temperature, which follows
the law exp(z) / sum exp(z) (Gumbel, "Statistical Theory of Extreme Values", 1954; the trick in
Maddison et al., "A* Sampling", NeurIPS 2014, section 2). Noise is a function of (seed, sample
index, position, token id) only (noise.py). Scores are compared in float64; of equal ones the
smaller token id wins.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.sampling.draw import numpy_rows
from quire.ops.sampling.draw.cases import make_inputs
from quire.ops.sampling.draw.cpu import bind
from quire.ops.sampling.draw.masks import with_masks
from quire.ops.sampling.draw.reference import draw
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="draw",
    reference=with_masks(draw),
    make_inputs=make_inputs,
    tolerance=exact(),  # the same token
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.sampling.draw.triton:draw"),
        numpy_rows.PROVIDER,
    ),
)
