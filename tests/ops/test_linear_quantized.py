"""Integer linear kernels: equal to the reference on any shape, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Case, Op, PackedMatrix, Provider, Team
from quire.ops.check import compare
from quire.ops.linear.int4.cases import int4_weight
from quire.ops.linear.int4.contract import GROUP_SIZES
from quire.ops.linear.int8.cases import int8_weight
from quire.ops.random_tensors import DTYPES, normal

INT8, INT4 = ALL_OPS["linear_int8"], ALL_OPS["linear_int4"]
PLATFORM = detect_platform()
each_kernel = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param((op, provider), id=f"{op.name}-{provider.name}")
        for op in (INT8, INT4)
        for provider in op.providers
    ],
    indirect=True,
)
Arguments = tuple[torch.Tensor | None, ...]


def weights(op: Op, generator: torch.Generator, outputs: int, depth: int) -> Arguments:
    """Arguments of `op` for a matrix with bias and, in 4 bits, zero points and groups of 32."""
    bias = normal(generator, outputs)
    if op is INT8:
        return *int8_weight(generator, outputs, depth), bias
    return *int4_weight(generator, outputs, depth, 32), bias


def rows_with_trouble(
    generator: torch.Generator, rows: int, depth: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of very different size with a stride, some of zeros, NaN or infinity."""
    x = normal(generator, rows, depth + 3)[:, :depth]
    kind = torch.randint(12, (rows, 1), generator=generator)
    x = torch.where(kind == 0, 0.0, x * 10.0 ** (kind - 6))
    x = torch.where(kind == 1, torch.nan, torch.where(kind == 2, -torch.inf, x))
    return x.to(dtype)


def compare_all(op: Op, case: Case) -> None:
    for provider in op.providers:
        if provider.unavailable(PLATFORM) is None:
            difference = compare(op, provider.load(), case)
            assert difference is None, f"{provider.name}: {difference}"


@examples(40)
@given(
    rows=st.integers(0, 130),
    outputs=st.integers(1, 400),
    depth=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_int8_shape_equals_the_reference(
    rows: int, outputs: int, depth: int, dtype: torch.dtype, with_bias: bool, seed: int
) -> None:
    """Turns red on a wrong tail of rows, outputs or depth, and on a row that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    weight, scale, bias = weights(INT8, generator, outputs, depth)
    x = rows_with_trouble(generator, rows, depth, dtype)
    ids = torch.randint(outputs, (5,), generator=generator)
    compare_all(INT8, Case("random", (x, weight, scale, bias if with_bias else None, ids)))


@examples(40)
@given(
    rows=st.integers(0, 130),
    outputs=st.integers(1, 200),
    groups=st.integers(1, 5),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(DTYPES),
    with_zero=st.booleans(),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_int4_shape_equals_the_reference(
    rows: int,
    outputs: int,
    groups: int,
    group_size: int,
    dtype: torch.dtype,
    with_zero: bool,
    with_bias: bool,
    seed: int,
) -> None:
    """Turns red when a group takes another's scale or zero point, and on a wrong tail."""
    generator = torch.Generator().manual_seed(seed)
    depth = groups * group_size
    weight, scale, zero = int4_weight(generator, outputs, depth, group_size)
    bias = normal(generator, outputs) if with_bias else None
    x = rows_with_trouble(generator, rows, depth, dtype)
    ids = torch.randint(outputs, (5,), generator=generator)
    case = Case("random", (x, weight, scale, zero if with_zero else None, bias, ids))
    compare_all(INT4, case)


@examples(30)
@given(
    op=st.sampled_from((INT8, INT4)),
    rows=st.integers(0, 40),
    outputs=st.integers(1, 100),
    blocks=st.integers(1, 3),
    rotation=st.sampled_from((32, 64, 128, 256, 512)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_any_rotation_equals_the_reference(
    op: Op,
    rows: int,
    outputs: int,
    blocks: int,
    rotation: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Turns red when a sum of the rotation is made in another order, in any element type, and on
    rows that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    *weight, bias = weights(op, generator, outputs, blocks * rotation)
    x = rows_with_trouble(generator, rows, blocks * rotation, dtype)
    ids = torch.randint(outputs, (5,), generator=generator)
    compare_all(op, Case("random", (x, *weight, bias, ids), {"rotation": rotation}))


BLOCK_EDGES = (264, 265, 266, 267, 533)
"""Rows around what one block takes, and two (`kBlockRows` in csrc)."""


@each_kernel
@pytest.mark.parametrize(("outputs", "depth"), [(33, 32), (257, 96), (640, 512)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    kernel: tuple[Op, Provider], outputs: int, depth: int
) -> None:
    """Batched = alone, and one thread = two. Turns red when a sum depends on the tile, on the
    block of rows, or on the threads."""
    op, provider = kernel
    generator = torch.Generator().manual_seed(0)
    arguments = weights(op, generator, outputs, depth)
    x = normal(generator, BLOCK_EDGES[-1], depth)
    matrix = provider.load()(*arguments)
    alone = torch.cat([matrix(row) for row in x.split(1)])
    for threads in (1, 2):
        matrix = provider.load(Team(threads))(*arguments)
        for rows in (*range(1, 131), *BLOCK_EDGES):
            assert torch.equal(matrix(x[:rows]), alone[:rows]), f"{rows} rows, {threads} threads"


def test_all_instruction_sets_give_the_same_bits() -> None:
    """Turns red when a machine of one kind answers another than a machine of another kind."""
    generator = torch.Generator().manual_seed(0)
    for op in (INT8, INT4):
        arguments = weights(op, generator, 100, 1024)
        x = normal(generator, 30, 1024)
        found = [
            provider.load()(*arguments)(x)
            for provider in op.providers
            if provider.unavailable(PLATFORM) is None
        ]
        for other in found[1:]:
            assert torch.equal(other, found[0])


def test_int8_equals_the_reference_to_the_bit() -> None:
    """Turns red when an integer product is inexact for a deep layer with the largest weights: the
    reference has the same float32 operations in the same order."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.full((33, 9001), 127, dtype=torch.int8)
    weight[::2] = -127
    weight[:, ::7] = -128  # beyond the contract, and still exact
    scale = torch.rand(33, generator=generator)
    x = 100 + normal(generator, 13, 9001)
    expected = INT8.reference(weight, scale)(x)
    for provider in INT8.providers:
        if provider.unavailable(PLATFORM) is None:
            assert torch.equal(provider.load()(weight, scale)(x), expected), provider.name


@each_kernel
@pytest.mark.parametrize("wrong", [-1, 71])
def test_an_id_outside_the_table_is_refused(kernel: tuple[Op, Provider], wrong: int) -> None:
    """Turns red when a wrong token id reads another tensor's memory."""
    op, provider = kernel
    matrix = provider.load()(*weights(op, torch.Generator().manual_seed(0), 71, 32))
    with pytest.raises(EngineError, match="code 3"):
        matrix.rows(torch.tensor([0, wrong]))


@each_kernel
def test_shapes_that_break_the_contract_are_refused(kernel: tuple[Op, Provider]) -> None:
    """Turns red when a wrong tensor reaches a kernel that reads by pointer."""
    op, provider = kernel
    weight, scale, *rest = weights(op, torch.Generator().manual_seed(0), 71, 32)
    assert weight is not None and scale is not None
    for wrong in (
        (weight.float(), scale),
        (weight, scale[:70]),
        (weight[:0], scale[:0]),
        (weight, scale, *rest[:-1], torch.zeros(70)),
    ):
        with pytest.raises(EngineError, match=op.name):
            provider.load()(*wrong)


@each_kernel
def test_rows_of_another_size_are_refused(kernel: tuple[Op, Provider]) -> None:
    """Turns red when a layer reads beyond the rows that it was given."""
    op, provider = kernel
    matrix = provider.load()(*weights(op, torch.Generator().manual_seed(0), 6, 32))
    for x in (torch.zeros(4, 31), torch.zeros(2, 2, 16)):
        with pytest.raises(EngineError, match="32 inputs"):
            matrix(x)


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_in_float32_is_what_is_rounded_otherwise(
    kernel: tuple[Op, Provider], dtype: torch.dtype
) -> None:
    """Turns red when logits are rounded to 16 bits on their way, or computed in another way than
    other outputs."""
    op, provider = kernel
    generator = torch.Generator().manual_seed(0)
    arguments = weights(op, generator, 71, 96)
    x = normal(generator, 15, 96, dtype=dtype)
    wide = provider.load()(*arguments)(x, torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), provider.load()(*arguments)(x))
    plain = op.reference(*arguments)(x, torch.float32)
    assert torch.allclose(wide, plain, rtol=2e-5, atol=2e-5)


@each_kernel
def test_inputs_of_three_dimensions(kernel: tuple[Op, Provider]) -> None:
    """Turns red when leading dimensions are lost."""
    op, provider = kernel
    generator = torch.Generator().manual_seed(0)
    matrix: PackedMatrix = provider.load()(*weights(op, generator, 6, 32))
    x = normal(generator, 3, 32, 5).transpose(1, 2)
    assert torch.equal(matrix(x), matrix(x.reshape(15, 32)).view(3, 5, 6))
    assert matrix.rows(torch.tensor([[1, 2]])).shape == (1, 2, 32)
