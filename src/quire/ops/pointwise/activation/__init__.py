"""Pointwise activation by name.

`activation(x, kind)` → tensor like x, newly allocated. kind: gelu, gelu_tanh (also under its
checkpoint names gelu_new and gelu_pytorch_tanh), relu, relu2 (its square: So et al. 2021,
arXiv:2109.08668, section 3), silu. Computed in float32, rounded once. Raises ConfigError for
another name.

The gate of a gated MLP: an activation of the first half times the second half.

`activation_and_mul(x, kind)` : [..., 2·I] → [..., I], newly allocated; x's last dimension
contiguous. kind and its errors as in `ops.pointwise.activation`, or swiglu_clamped (OpenAI 2025,
arXiv:2508.10925, section 2.2): min(g, 7) · logistic(1.702 min(g, 7)) · (1 + u), |u| ≤ 7, of the
halves g and u. Computed in float32, rounded once.
"""

from quire.ops.native.cpu_provider import cpu_providers
from quire.ops.operation import Op, rounding
from quire.ops.pointwise.activation.cases import make_gates, make_inputs
from quire.ops.pointwise.activation.cpu import bind, bind_with_mul
from quire.ops.pointwise.activation.reference import activation, activation_and_mul
from quire.ops.triton_provider import triton_provider

__all__ = ["MUL_OP", "OP"]

OP = Op(
    name="activation",
    reference=activation,
    make_inputs=make_inputs,
    tolerance=rounding("a polynomial exp, erf or tanh", float32=4e-6),
    providers=(
        *cpu_providers(bind),
        triton_provider("quire.ops.pointwise.activation.triton:activation"),
    ),
)

MUL_OP = Op(
    name="activation_and_mul",
    reference=activation_and_mul,
    make_inputs=make_gates,
    tolerance=rounding("a polynomial exp, erf or tanh, then a product", float32=4e-6),
    providers=(
        *cpu_providers(bind_with_mul),
        triton_provider("quire.ops.pointwise.activation.triton:activation_and_mul"),
    ),
)
