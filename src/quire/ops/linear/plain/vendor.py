"""`linear` on a GPU by torch, which calls the vendor's matrix products (cuBLAS, hipBLAS)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.platform import Platform
from quire.ops.linear.plain.contract import check_arguments
from quire.ops.linear.plain.reference import widened_product
from quire.ops.native.team import ALONE, Team
from quire.ops.operation import FOR_GPUS, Provider

__all__ = ["VENDOR", "VendorMatrix", "load_vendor", "product_into_float32"]

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [T, I] and weight [O, I] of one 16-bit dtype → float32 [T, O], never rounded between."""


class VendorMatrix:
    """A `PackedMatrix` with its weight unchanged, row by row."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        into_float32: Product = widened_product,
    ) -> None:
        check_arguments(weight, bias)
        self.weight, self.bias = weight.contiguous(), bias
        self._into_float32 = into_float32

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        out_dtype = out_dtype or x.dtype
        if x.dtype == self.weight.dtype == out_dtype:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        same = x.dtype == self.weight.dtype != torch.float32
        multiply = self._into_float32 if same else widened_product
        y = multiply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], len(self.weight))
        return (y if self.bias is None else y + self.bias.float()).to(out_dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, self.weight)


def product_into_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply 16-bit operands, storing the float32 sums unrounded. Torch has this product for CUDA
    alone, since 2.8: https://docs.pytorch.org/docs/2.13/generated/torch.mm.html."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def load_vendor(team: Team = ALONE) -> Callable[..., VendorMatrix]:  # noqa: ARG001  no threads here
    """`linear` by torch; contract in `quire.ops.linear.plain`.

    Where K is split, cuBLAS may add the parts in 16 bits unless torch forbids it for the process;
    the contract asks for sums in float32.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    multiply = product_into_float32 if torch.version.hip is None else widened_product

    def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> VendorMatrix:
        return VendorMatrix(weight, bias, multiply)

    return pack


def _unavailable(platform: Platform) -> str | None:
    if platform.device == "cpu":
        return FOR_GPUS
    return None if torch.cuda.is_available() else "torch sees no GPU"


VENDOR = Provider("torch", _unavailable, load_vendor)
