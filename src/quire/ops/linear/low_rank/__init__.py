"""Low-rank additions to the outputs of a projection, chosen for each row (LoRA, Hu et al. 2021,
arXiv:2106.09685, equation 3).

`low_rank(y, x, slots, tables, of_all_ranks=None)` adds s B (A x) to the rows of y in place. y: [T,
O]; x: [T, I], both of the tables' dtype. slots: int64 [T], 0 for a row that keeps its bits,
otherwise 1 + the index of its adapter. tables: `LowRankTables`. Sums, with the value in y, are in
float32 and rounded once; a row's result depends on no other row. of_all_ranks: makes the sum A x
float32 [T, P · R] from this rank's part, if ranks share the inputs; numbers beyond an adapter's
rank mean nothing. A slot beyond the tables raises IndexError with torch, EngineError with the C++
kernels.
"""

from quire.ops.linear.low_rank.cases import make_inputs
from quire.ops.linear.low_rank.cpu import bind
from quire.ops.linear.low_rank.reference import low_rank
from quire.ops.linear.low_rank.tables import LowRankTables
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding

__all__ = ["OP", "LowRankTables"]

OP = Op(
    name="low_rank",
    reference=low_rank,
    make_inputs=make_inputs,
    tolerance=rounding("float32 sums in another order", float32=2e-5),
    providers=cpu_providers(bind),
)
