"""Pointwise activation by name.

`activation(x, kind)` → tensor like x, newly allocated. kind: gelu, gelu_tanh (also under its
checkpoint names gelu_new and gelu_pytorch_tanh), relu, silu. Computed in float32, rounded once.
Raises ConfigError for another name.
"""

from quire.ops.activation.cpu import bind
from quire.ops.activation.inputs import make_inputs
from quire.ops.activation.reference import activation
from quire.ops.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.triton_provider import triton_provider

__all__ = ["OP"]

OP = Op(
    name="activation",
    reference=activation,
    make_inputs=make_inputs,
    tolerance=rounding("a polynomial exp, erf or tanh", float32=4e-6),
    providers=(*cpu_providers(bind), triton_provider("quire.ops.activation.triton:activation")),
)
