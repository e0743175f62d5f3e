"""The references of the integer linear layers equal formulas written another way."""

from __future__ import annotations

import pytest
import torch

from quire.base.errors import EngineError
from quire.ops import ALL_OPS
from quire.ops.linear.int4.cases import int4_weight
from quire.ops.linear.int4.contract import GROUP_SIZES, pack_scale
from quire.ops.linear.int8.activations import quantize_rows
from quire.ops.linear.int8.cases import int8_weight
from quire.ops.linear.rotate.reference import rotate
from quire.ops.random_tensors import DTYPES, normal

INT8 = ALL_OPS["linear_int8"].reference
INT4 = ALL_OPS["linear_int4"].reference


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_quantized_to_half_a_step(dtype: torch.dtype) -> None:
    """Turns red when the range is not used to its end, or a row takes another row's scale."""
    x = normal(generator(), 20, 300, dtype=dtype) * torch.logspace(-4, 4, 20).unsqueeze(1).to(dtype)
    integers, scale = quantize_rows(x)
    assert torch.equal(integers, integers.round())
    assert (integers.abs().amax(dim=1) == 127).all()
    assert ((integers * scale - x.float()).abs() <= 0.5001 * scale).all()


@pytest.mark.parametrize("block", [16, 64, 512])
def test_a_rotation_is_a_product_with_sylvesters_matrix(block: int) -> None:
    """Turns red when neighbours are paired wrongly, or a second rotation does not undo the
    first."""
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    x = normal(generator(), 3, 2, 2 * block)
    expected = (x.unflatten(-1, (2, block)).double() @ matrix.double()).flatten(-2)
    torch.testing.assert_close(rotate(x, block), expected.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotate(rotate(x, block), block) / block, x)


@pytest.mark.parametrize(("rotation", "inputs"), [(8, 64), (24, 48), (64, 96), (0, 32)])
def test_rotations_that_no_kernel_has_are_refused(rotation: int, inputs: int) -> None:
    weight, scale = int8_weight(generator(), 4, inputs)
    with pytest.raises(EngineError, match=f"{inputs} inputs cannot be rotated in blocks of"):
        INT8(weight, scale, rotation=rotation)


def test_rows_without_a_range() -> None:
    """Turns red when a row of zeros divides by zero, a tiny one overflows, or NaN is lost."""
    x = torch.ones(6, 3)
    x[0], x[1], x[2, 1], x[3, 2], x[4] = 0.0, 1e-38, float("nan"), float("-inf"), 3e38
    integers, scale = quantize_rows(x)
    assert not integers[:4].any()
    assert scale[:2].flatten().tolist() == [0.0, 0.0]
    assert scale[2:4].isnan().all()
    assert (integers[4:] == 127).all()
    assert scale[4:].isfinite().all()


@pytest.mark.parametrize("depth", [1, 37, 3000])
def test_int8_equals_a_product_of_dequantized_numbers(depth: int) -> None:
    """Turns red when integers are not exact for a deep layer, or a scale belongs to another row."""
    weight, scale = int8_weight(generator(), 50, depth)
    bias = normal(generator(), 50)
    x = normal(generator(), 2, 3, depth)
    integers, x_scale = quantize_rows(x)
    expected = (integers * x_scale).double() @ (weight * scale.unsqueeze(1)).double().t() + bias
    torch.testing.assert_close(INT8(weight, scale, bias)(x), expected.float())


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_equals_a_product_of_dequantized_numbers(group_size: int, symmetric: bool) -> None:
    """Turns red when a group takes another group's scale or zero point."""
    weight, scale, zero = int4_weight(generator(), 50, 3 * group_size, group_size)
    bias = normal(generator(), 50)
    matrix = INT4(weight, scale, None if symmetric else zero, bias)
    x = normal(generator(), 2, 3, 3 * group_size)
    integers, x_scale = quantize_rows(x)
    shift = torch.full_like(zero, 8) if symmetric else zero
    centred = weight.float() - shift.repeat_interleave(group_size, dim=1)
    values = centred * scale.repeat_interleave(group_size, dim=1)
    torch.testing.assert_close(matrix.rows(torch.arange(50)), values, rtol=2**-11, atol=0.0)
    expected = (integers * x_scale).double() @ matrix.rows(torch.arange(50)).double().t() + bias
    torch.testing.assert_close(matrix(x), expected.float(), rtol=1e-5, atol=1e-5)


def test_scales_in_16_bits_keep_11_bits_whatever_their_size() -> None:
    """Turns red when scales of very small or large weights lose bits, and when a checkpoint's
    float16 scales change."""
    scale = torch.logspace(-12, 12, 60).unsqueeze(1) * (0.1 + torch.rand(60, 8))
    kept, power = pack_scale(scale)
    torch.testing.assert_close(kept.float() * power.unsqueeze(1), scale, rtol=2**-11, atol=0.0)
    stored = (torch.rand(60, 8) * 1e-4).half().float()
    kept, power = pack_scale(stored)
    assert torch.equal(kept.float() * power.unsqueeze(1), stored)
    kept, power = pack_scale(torch.zeros(2, 3))
    assert not kept.any() and power.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_to_the_dtype_asked_for(dtype: torch.dtype) -> None:
    """Turns red when a tied embedding gives another dtype than the model computes in."""
    weight, scale = int8_weight(generator(), 9, 8)
    ids = torch.tensor([[3, 0]])
    got = INT8(weight, scale, dtype=dtype).rows(ids.int())
    assert torch.equal(got, (weight[ids] * scale[ids].unsqueeze(-1)).to(dtype))
    weight, scale, zero = int4_weight(generator(), 9, 64, 32)
    got = INT4(weight, scale, zero, dtype=dtype).rows(torch.tensor([3, 0]))
    assert got.dtype == dtype and got.shape == (2, 64)


def test_shapes_that_break_the_contract_are_refused() -> None:
    """Turns red when a wrong tensor reaches a kernel that reads by pointer."""
    weight, scale = int8_weight(generator(), 9, 8)
    with pytest.raises(EngineError, match=r"int8 matrix.*float32"):
        INT8(weight.float(), scale)
    with pytest.raises(EngineError, match=r"scale for each of 9 outputs.*\[8\]"):
        INT8(weight, scale[:8])
    with pytest.raises(EngineError, match=r"bias of 9"):
        INT8(weight, scale, torch.zeros(8))
    weight4, scale4, zero4 = int4_weight(generator(), 9, 96, 32)
    with pytest.raises(EngineError, match=r"uint8 matrix.*int8"):
        INT4(weight4.to(torch.int8), scale4)
    with pytest.raises(EngineError, match=r"per 32, 64, 128 inputs of a 9 × 96.*\[9, 4\]"):
        INT4(weight4, torch.ones(9, 4))
    with pytest.raises(EngineError, match="zero points"):
        INT4(weight4, scale4, zero4[:, :2])
    with pytest.raises(EngineError, match="zero holds 16"):
        INT4(weight4, scale4, zero4 + 16 - zero4)
