"""`linear` in Triton: for few rows, beside the vendor's product for many; or for any number of rows
with the same bits."""

from __future__ import annotations

import torch

from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.linear.plain.tiles import MAX_FEW_ROWS, Tiles, default_tiles, invariant_tiles
from quire.ops.linear.plain.triton_product import multiply
from quire.ops.linear.plain.vendor import VendorMatrix, load_vendor

__all__ = ["InvariantMatrix", "SplitMatrix", "invariant_linear", "linear", "num_processors"]


class SplitMatrix:
    """A `PackedMatrix` that splits the sums of few rows.

    vendor: the same matrix, for more rows and for rows of another dtype than the weight.
    """

    def __init__(self, vendor: VendorMatrix) -> None:
        self._vendor = vendor
        self._processors = num_processors(vendor.weight.device)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        weight = self._vendor.weight
        num_rows = x.numel() // x.shape[-1]
        if num_rows > MAX_FEW_ROWS or x.dtype != weight.dtype:
            return self._vendor(x, out_dtype)
        outputs, depth = weight.shape
        tiles = default_tiles(num_rows, outputs, depth, self._processors, weight.itemsize)
        return product(self._vendor, x, out_dtype, tiles)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._vendor.rows(ids)


class InvariantMatrix:
    """A `PackedMatrix` that gives a row the same bits whatever rows share the call."""

    def __init__(self, vendor: VendorMatrix) -> None:
        self._vendor = vendor
        outputs, depth = vendor.weight.shape
        self._tiles = invariant_tiles(outputs, depth, vendor.weight.itemsize)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if x.dtype != self._vendor.weight.dtype:
            return self._vendor(x, out_dtype)
        return product(self._vendor, x, out_dtype, self._tiles)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._vendor.rows(ids)


def product(
    matrix: VendorMatrix, x: torch.Tensor, out_dtype: torch.dtype | None, tiles: Tiles
) -> torch.Tensor:
    """Compute the product of x [..., I] in the dtype of the matrix, by Triton."""
    rows = x.reshape(-1, x.shape[-1])
    y = multiply(rows, matrix.weight, matrix.bias, out_dtype or x.dtype, tiles)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], len(matrix.weight))


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedMatrix:
    """Contract in `quire.ops.linear.plain`."""
    return SplitMatrix(_vendor_matrix(weight, bias))


def invariant_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedMatrix:
    """Contract in `ops.linear.plain`, including that of providers for CPUs: a row has one order of
    sums."""
    return InvariantMatrix(_vendor_matrix(weight, bias))


def num_processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 4 in Triton's interpreter, whose time grows with
    programs."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _vendor_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> VendorMatrix:
    if weight.device.type != "cuda":
        return VendorMatrix(weight, bias)
    return load_vendor()(weight, bias)
