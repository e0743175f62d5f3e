"""Copy whole blocks of every layer within the pool (copy-on-write, forks).

`copy_blocks(pages, src, dst) → None`

pages: [N, B, ...] of any dtype, contiguous: N segments of B blocks each. src, dst: int64 [C] block
ids. All sources are read before any destination is written; destinations are distinct.
"""

from quire.ops.kv.copy_blocks.cases import make_inputs
from quire.ops.kv.copy_blocks.cpu import bind
from quire.ops.kv.copy_blocks.reference import copy_blocks
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="copy_blocks",
    reference=copy_blocks,
    make_inputs=make_inputs,
    tolerance=exact(),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.kv.copy_blocks.triton:copy_blocks"),
    ),
)
