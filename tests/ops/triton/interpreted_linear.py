"""Matrix products in Triton's interpreter: any shape, and what a batch must not change.

Started by tests/ops/test_triton.py, as interpreted_providers.py is.
"""

from __future__ import annotations

import pytest
import torch
from tests.ops.triton.interpreter import repair_interpreter

from quire.ops import ALL_OPS, check_provider
from quire.ops.inputs import normal
from quire.ops.linear import INVARIANT
from quire.ops.linear.reference import widened_product
from quire.ops.linear.tiles import Tiles
from quire.ops.linear.triton_product import multiply

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, over NaN and inf


def test_the_invariant_product_equals_the_reference() -> None:
    """The other provider is compared in interpreted_providers.py."""
    report = check_provider(ALL_OPS["linear"], INVARIANT)
    assert report.ok, "\n".join(report.failures)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "pieces"),
    [(1, 33, 200, 4), (17, 64, 96, 8), (40, 5, 33, 1), (3, 1030, 64, 2), (0, 4, 16, 2)],
)
def test_any_cut_gives_the_product(
    rows: int, outputs: int, depth: int, pieces: int, out_dtype: torch.dtype
) -> None:
    """Turns red on a wrong tail of rows, outputs, inputs or pieces."""
    generator = torch.Generator().manual_seed(0)
    x = normal(generator, rows, depth + 5, dtype=torch.bfloat16)[:, :depth]
    weight = normal(generator, outputs, depth, dtype=torch.bfloat16) / depth**0.5
    bias = normal(generator, outputs, dtype=torch.bfloat16)
    expected = (widened_product(x, weight) + bias.float()).to(out_dtype)
    tiles = Tiles(16, 32, 16, pieces, 4, 2)
    got = multiply(x, weight, bias, out_dtype, tiles)
    assert got.dtype == out_dtype
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-3)
    if out_dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_invariant_product_of_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Turns red when the order of a sum depends on the number of rows: across the number from which
    one program adds all pieces itself, and within a tile. A row keeps its place in its tile, since
    NumPy's products, which the interpreter uses, round rows differently by where they stand."""
    generator = torch.Generator().manual_seed(0)
    weight = normal(generator, 40, 1000, dtype=dtype)
    bias = normal(generator, 40, dtype=dtype)
    matrix = INVARIANT.load()(weight, bias)
    x = normal(generator, 300, 1000, dtype=dtype)
    whole = matrix(x, torch.float32)
    for num_rows in (1, 2, 63, 65, 256, 257):
        assert torch.equal(matrix(x[:num_rows], torch.float32), whole[:num_rows])


def test_a_row_that_is_not_finite_stays_alone() -> None:
    """Turns red when NaN of one request reaches another through a shared tile."""
    generator = torch.Generator().manual_seed(0)
    x, weight = normal(generator, 9, 40), normal(generator, 50, 40)
    tiles = Tiles(16, 32, 16, 2, 4, 2)
    clean = multiply(x, weight, None, torch.float32, tiles)
    x[4, 7], x[5, 39] = float("nan"), float("inf")
    got = multiply(x, weight, None, torch.float32, tiles)
    assert got[4].isnan().all()
    assert not got[5].isfinite().any()
    others = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(got[others], clean[others])
