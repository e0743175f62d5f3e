"""Matrix products in Triton's interpreter: any shape, and what a batch must not change.

Started by tests/ops/test_triton.py, as interpreted_providers.py is.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from tests.ops.triton.interpreter import repair_interpreter
from tests.profiles import SCALE

from quire.ops import ALL_OPS, check_provider
from quire.ops.linear.int4.cases import int4_weight
from quire.ops.linear.int8 import activations, triton_scaled
from quire.ops.linear.plain import INVARIANT
from quire.ops.linear.plain.reference import widened_product
from quire.ops.linear.plain.tiles import Tiles
from quire.ops.linear.plain.triton_product import multiply
from quire.ops.random_tensors import normal

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, over NaN and inf


def test_the_invariant_product_equals_the_reference() -> None:
    """Every sixth case, in a soak every third. The other one is in interpreted_providers.py."""
    op = ALL_OPS["linear"]
    make = op.make_inputs
    op = replace(
        op, make_inputs=lambda generator: islice(make(generator), 0, None, 3 if SCALE > 1 else 6)
    )
    report = check_provider(op, INVARIANT)
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


@pytest.mark.parametrize("zero_points", [False, True])
def test_sums_of_4_bit_groups_have_one_order_in_any_batch(zero_points: bool) -> None:
    """The same in groups, across the number from which one program adds all pieces."""
    generator = torch.Generator().manual_seed(0)
    weight, scale, zero = int4_weight(generator, 20, 15 * 32, 32)
    provider = ALL_OPS["linear_int4"].provider("triton")
    assert provider is not None
    matrix = provider.load()(weight, scale, zero if zero_points else None)
    x = normal(generator, 258, 15 * 32)
    whole = matrix(x)
    for num_rows in (1, 17, 256):
        assert torch.equal(matrix(x[:num_rows]), whole[:num_rows])


def test_rows_become_the_same_integers_as_those_of_the_reference() -> None:
    """To the bit: rows longer than a block, zeros, tiny numbers, NaN and infinity."""
    generator = torch.Generator().manual_seed(0)
    x = normal(generator, 7, 9000)
    x[1], x[2], x[3, 8999], x[4, 5] = 0.0, 1e-32, float("nan"), float("-inf")
    expected, scale = activations.quantize_rows(x)
    got, got_scale = triton_scaled.quantize_rows(x)
    assert torch.equal(got.float(), expected)
    assert torch.equal(got_scale.nan_to_num(9.0), scale.squeeze(1).nan_to_num(9.0))


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
