"""Products of blocks of neighbours with a Hadamard matrix: `rotate(x, block)` → x [..., I] with
each block of neighbours multiplied by H (`reference.rotate`), float32, newly allocated.

x: float32, bfloat16 or float16. block: a power of two from `LEAST_ROTATION` on that divides I, or
1, which gives x itself. Sums have one order, so all providers give the same bits; infinity and NaN
stay within their block. Raises EngineError for another block.

Weights are rotated by it while a checkpoint loads. `linear_int8` and `linear_int4` rotate their
inputs in the same order of sums, while they round them.
"""

from quire.ops.linear.rotate.cpu import bind
from quire.ops.linear.rotate.reference import (
    LEAST_ROTATION,
    check_rotation,
    make_inputs,
    rotate,
)
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, exact

__all__ = ["LEAST_ROTATION", "OP", "check_rotation", "rotate"]

OP = Op(
    name="rotate",
    reference=rotate,
    make_inputs=make_inputs,
    tolerance=exact("sums in one order"),
    providers=cpu_providers(bind),
)
