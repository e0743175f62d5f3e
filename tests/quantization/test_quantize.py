"""Plain weights to integers and scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.base.platform import detect_platform
from quire.compute.quantization import quantize_int4, quantize_int8
from quire.compute.quantization.weight_format import BLOCK_ELEMENTS
from quire.ops import build_op_set
from quire.ops.linear.int8.reference import PlainInt8Matrix
from quire.ops.linear.rotate import rotate
from tests.profiles import machine_settings

GROUP_SIZES = (32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

seeds = st.integers(0, 2**16)
sizes = st.integers(1, 40)
magnitudes = st.sampled_from([1e-6, 0.02, 1.0, 1e4])


def random_weight(seed: int, outputs: int, inputs: int, magnitude: float = 1.0) -> torch.Tensor:
    """Some rows of zeros, some of one sign only."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * magnitude
    weight[seed % 7 :: 7] = 0
    weight[seed % 5 :: 5].abs_()
    return weight


def dequantize_int4(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> torch.Tensor:
    groups = values.float().unflatten(1, (scale.shape[1], -1))
    shift = 8.0 if zero is None else zero.float().unsqueeze(2)
    return ((groups - shift) * scale.unsqueeze(2)).flatten(1)


@machine_settings(60)
@given(seed=seeds, outputs=sizes, inputs=st.integers(1, 300), magnitude=magnitudes)
def test_int8_is_within_half_a_step(seed: int, outputs: int, inputs: int, magnitude: float) -> None:
    """Catches a wrong scale, a wrong axis, and values that wrap around."""
    weight = random_weight(seed, outputs, inputs, magnitude)
    values, scale = quantize_int8(weight)
    assert (values.dtype, scale.shape) == (torch.int8, (outputs,))
    assert int(values.min()) >= -127
    torch.testing.assert_close(scale * 127, weight.abs().amax(1))
    step = scale[:, None]
    assert ((values * step - weight).abs() <= step * 0.5001).all()


@machine_settings(60)
@given(
    seed=seeds,
    outputs=sizes,
    groups=st.integers(1, 6),
    group_size=st.sampled_from(GROUP_SIZES),
    zero_points=st.booleans(),
    magnitude=magnitudes,
)
def test_int4_is_no_worse_than_its_simplest_grid(
    seed: int, outputs: int, groups: int, group_size: int, zero_points: bool, magnitude: float
) -> None:
    """Catches a search that keeps the wrong grid, and a scale that does not belong to its values.
    The simplest grids are max|w| / 8 and (max - min) / 15."""
    weight = random_weight(seed, outputs, groups * group_size, magnitude)
    values, scale, zero = quantize_int4(weight, group_size, zero_points=zero_points)
    assert scale.shape == (outputs, groups)
    assert (zero is not None) == zero_points
    assert int(values.max()) <= 15
    if zero is not None:
        assert int(zero.max()) <= 15
    by_group = weight.unflatten(1, (groups, group_size))
    error = (dequantize_int4(values, scale, zero) - weight).unflatten(1, (groups, group_size))
    simple = simplest_grid(by_group, zero_points=zero_points) - by_group
    assert (error.square().sum(2) <= simple.square().sum(2) * 1.001).all()


def simplest_grid(groups: torch.Tensor, *, zero_points: bool) -> torch.Tensor:
    """groups [O, n, G] rounded to the nearest numbers of a grid without any search."""
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    if zero_points:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-30)
        zero = (-low / scale).round()
    else:
        scale = torch.where(-low > high, -low, -high) / 8
        scale = torch.where(scale == 0, 1e-30, scale)
        zero = torch.tensor(8.0)
    return ((groups / scale + zero).round().clamp(0, 15) - zero) * scale


@pytest.mark.parametrize("zero_points", [False, True])
def test_int4_keeps_what_lies_on_its_grid(zero_points: bool) -> None:
    """Catches an error of one in zero points or in the ends of the range."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (9, 64), generator=generator)
    levels[:, ::32], levels[:, 1::32] = 0, 15
    zero = 8 if not zero_points else torch.arange(9)[:, None] + 3
    weight = (levels - zero) * 0.125
    values, scale, zeros = quantize_int4(weight, 32, zero_points=zero_points)
    torch.testing.assert_close(dequantize_int4(values, scale, zeros), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    """Catches a block of rows that is skipped, done twice or put into another's place."""
    outputs, inputs = 2 * BLOCK_ELEMENTS // 512 + 3, 512
    weight = random_weight(1, outputs, inputs).to(dtype)
    whole = [*quantize_int8(weight), *quantize_int4(weight, 64, zero_points=True)]
    for rows in (slice(0, 3), slice(outputs // 2 - 2, outputs // 2 + 2), slice(-3, None)):
        alone = [*quantize_int8(weight[rows]), *quantize_int4(weight[rows], 64, zero_points=True)]
        for got, expected in zip(alone, whole, strict=True):
            assert got is not None
            assert expected is not None
            assert torch.equal(got, expected[rows])


def test_rotated_weights_give_the_products_of_the_unrotated() -> None:
    """Turns red when inputs and weights are rotated differently, and when an outlier takes the
    bits of its neighbours: with rotation it must cost less than a third."""
    weight, x = random_weight(1, 50, 192), random_weight(2, 7, 192)
    x[:, 5] = 100.0
    expected = x @ weight.t()
    errors: list[float] = []
    for rotation in (1, 64):
        values, scale = quantize_int8(weight, rotation)
        matrix = PlainInt8Matrix(values, scale, rotation=rotation)
        torch.testing.assert_close(matrix.rows(torch.arange(50)), weight, rtol=0.1, atol=0.05)
        errors.append(float((matrix(x) - expected).norm()))
    assert errors[1] < errors[0] / 3, errors


@pytest.mark.parametrize("zero_points", [True, False])
def test_rotation_costs_4_bit_weights_nothing(zero_points: bool) -> None:
    """Turns red when blocks mix groups, whose scales they make alike, and when large weights keep
    the grid of their group wide."""
    normal = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    heavy = normal * random_weight(2, 64, 512).exp()  # as matrices of trained models
    for weight, most in ((normal, 1.01), (heavy, 0.8)):
        errors: list[float] = []
        for rotation in (1, 32):
            found = quantize_int4(weight, zero_points=zero_points, rotation=rotation)
            errors.append(float((rotate(dequantize_int4(*found), rotation) - weight).norm()))
        assert errors[1] <= most * errors[0], errors


def test_a_kernel_rotates_weights_to_the_same_integers() -> None:
    """Turns red when loading by a kernel and converting by torch would differ."""
    kernel = build_op_set(detect_platform()).rotate
    for dtype in DTYPES:
        weight = random_weight(4, 40, 512).to(dtype)
        for got, expected in zip(
            (
                *quantize_int8(weight, 256, kernel),
                *quantize_int4(weight, rotation=32, rotate=kernel),
            ),
            (*quantize_int8(weight, 256), *quantize_int4(weight, rotation=32)),
            strict=True,
        ):
            assert got is not None
            assert expected is not None
            assert torch.equal(got, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_weight_spoils_no_other_row_and_no_range(bad: float) -> None:
    """Catches integers out of range, which would spill into a neighbour's bits when packed."""
    weight = random_weight(3, 4, 64)
    clean8, clean4 = quantize_int8(weight), quantize_int4(weight)
    weight[1, 5] = bad
    values, scale = quantize_int8(weight)
    assert not bool(scale[1].isfinite())
    for row in (0, 2, 3):
        assert torch.equal(values[row], clean8[0][row])
    values, scale, zero = quantize_int4(weight)
    assert zero is not None
    assert not bool(scale[1, 0].isfinite())
    assert max(int(values.max()), int(zero.max())) <= 15
    for row in (0, 2, 3):
        assert torch.equal(values[row], clean4[0][row])
