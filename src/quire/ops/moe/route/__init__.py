"""Choice of experts for each token, and their weights.

`route(logits, routing, bias=None, factors=None)` → ids int32 [T, k] and weights float32 [T, k];
logits float32 [T, E], bias and factors float32 [E] if `routing` has them
(`quire.config.model_spec`). The ids of a token are those of its largest scores, largest first, of
equals the smaller one. A row of logits with a NaN gives ids of some experts and weights of NaN. No
row depends on another.

Raises EngineError when the shapes break this contract.
"""

from quire.ops.moe.route.cases import make_inputs
from quire.ops.moe.route.cpu import bind
from quire.ops.moe.route.reference import route
from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding

__all__ = ["OP"]

OP = Op(
    name="route",
    reference=route,
    make_inputs=make_inputs,
    tolerance=rounding("a polynomial exp, and sums in another order", float32=4e-6),
    providers=cpu_providers(bind),
)
