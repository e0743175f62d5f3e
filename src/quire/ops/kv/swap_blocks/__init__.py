"""Copy whole blocks of every layer between two pools (to host memory and back).

`swap_blocks(source, target, src, dst) → None`

source, target: pages [N, B, ...] of one dtype, contiguous, that share no memory; they may differ
in the number of blocks B. src, dst: int64 [N] block ids; destinations are distinct.
"""

from quire.ops.kv.swap_blocks.cases import make_inputs
from quire.ops.kv.swap_blocks.cpu import bind
from quire.ops.kv.swap_blocks.reference import swap_blocks
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="swap_blocks",
    reference=swap_blocks,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.kv.copy_blocks.triton:swap_blocks"),
    ),
)
