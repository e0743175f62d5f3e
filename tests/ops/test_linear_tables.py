"""Weights that are looked up: their definition, the bits of `linear`, any shape and any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.test_linear_quantized import BLOCK_EDGES, rows_with_trouble
from tests.profiles import examples

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.config.packed.table_format import TABLE_BITS, TableFormat
from quire.ops import ALL_OPS, Op, Provider, Team
from quire.ops.linear.plain.contract import GatedPacked
from quire.ops.linear.tables.cases import table_weight
from quire.ops.linear.tables.contract import Tables
from quire.ops.random_tensors import DTYPES, normal

OP, LINEAR = ALL_OPS["linear_tables"], ALL_OPS["linear"]
PLATFORM = detect_platform()
PROVIDERS = [each for each in OP.providers if each.unavailable(PLATFORM) is None]
each_kernel = pytest.mark.parametrize(
    "kernel",
    [pytest.param((OP, provider), id=provider.name) for provider in OP.providers],
    indirect=True,
)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bits", TABLE_BITS)
def test_a_weight_is_its_definition(bits: int, own: bool) -> None:
    """Number by number, and every provider gives those rows. Turns red when a code, a table or an
    added number belongs to another weight, and when one of two numbers at a place is lost."""
    generator = torch.Generator().manual_seed(1)
    weight = table_weight(generator, bits, 37, 3, 20, own=own)
    numbers = weight.numbers()
    wanted = torch.empty_like(numbers)
    for output in range(37):
        table = weight.table[output if own else 0]
        for i in range(60):
            wanted[output, i] = table[int(weight.codes[output, i])] * weight.scale[output, i // 20]
    assert weight.added is not None
    for row, column, number in zip(*weight.added, strict=True):
        wanted[row, column] += number
    assert torch.equal(numbers, wanted)
    ids = torch.tensor([36, 0, 2])
    for dtype in DTYPES:
        for make in (OP.reference, *(provider.load() for provider in PROVIDERS)):
            assert torch.equal(make(weight, dtype=dtype).rows(ids), numbers[ids].to(dtype))


@examples(40)
@given(
    bits=st.sampled_from(TABLE_BITS),
    own=st.booleans(),
    rows=st.integers(0, 80),
    outputs=st.integers(2, 400),
    blocks=st.integers(1, 4),
    quads=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    gate=st.sampled_from((None, "silu")),
    threads=st.sampled_from((1, 2)),
    seed=st.integers(0, 2**31),
)
def test_products_have_the_bits_of_plain_weights(
    bits: int,
    own: bool,
    rows: int,
    outputs: int,
    blocks: int,
    quads: int,
    dtype: torch.dtype,
    with_bias: bool,
    gate: str | None,
    threads: int,
    seed: int,
) -> None:
    """Turns red on a wrong tail, and when panels or the columns of outputs are mixed up."""
    generator = torch.Generator().manual_seed(seed)
    outputs += outputs % 2  # halves for a gate
    weight = table_weight(generator, bits, outputs, blocks, 4 * quads, own=own)
    x = rows_with_trouble(generator, rows, weight.codes.shape[1], dtype)
    bias = normal(generator, outputs, dtype=dtype) if with_bias else None
    plain = weight.numbers().to(dtype)
    for provider in PROVIDERS:
        linear = LINEAR.provider(provider.name)
        assert linear is not None
        wanted = linear.load()(plain, bias, gate=gate)
        found = provider.load(Team(threads))(weight, bias, dtype=dtype, gate=gate)
        for out_dtype in (dtype, torch.float32):
            torch.testing.assert_close(
                found(x, out_dtype), wanted(x, out_dtype), rtol=0, atol=0, equal_nan=True
            )
        if gate is not None:
            assert isinstance(found, GatedPacked)
            whole = provider.load()(weight, bias, dtype=dtype)
            torch.testing.assert_close(found.ungated(x), whole(x), rtol=0, atol=0, equal_nan=True)


@each_kernel
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kernel: tuple[Op, Provider]) -> None:
    """Turns red when a sum depends on how many panels are widened at once."""
    generator = torch.Generator().manual_seed(0)
    weight = table_weight(generator, 8, 97, 2, 32, own=False)
    x = normal(generator, BLOCK_EDGES[-1], 64)
    matrix = kernel[1].load()(weight)
    alone = torch.cat([matrix(row) for row in x.split(1)])
    for threads in (1, 2):
        matrix = kernel[1].load(Team(threads))(weight)
        for rows in (1, 2, 7, 33, *BLOCK_EDGES):
            assert torch.equal(matrix(x[:rows]), alone[:rows]), f"{rows} rows, {threads} threads"


@each_kernel
def test_a_matrix_of_many_pieces(kernel: tuple[Op, Provider]) -> None:
    """More panels than are widened at a time. Turns red when a later piece takes the weights, the
    bias or the outputs of the first."""
    generator = torch.Generator().manual_seed(0)
    weight = table_weight(generator, 4, 1000, 1, 2048, own=True)
    x, bias = normal(generator, 40, 2048), normal(generator, 1000)
    matrix = kernel[1].load(Team(2))(weight, bias)
    gated = kernel[1].load(Team(2))(weight, bias, gate="silu")
    wanted = x @ weight.numbers().t() + bias
    up = torch.nn.functional.silu(wanted[:, :500]) * wanted[:, 500:]
    for rows in (1, 40):
        torch.testing.assert_close(matrix(x[:rows]), wanted[:rows], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(gated(x[:rows]), up[:rows], rtol=1e-3, atol=1e-3)
        assert torch.equal(gated.ungated(x[:rows]), matrix(x[:rows]))
        out = torch.zeros(rows, 1010)
        matrix.into(x[:rows], out[:, 5:1005])
        assert torch.equal(out[:, 5:1005], matrix(x[:rows]))
        assert not out[:, :5].any()
        assert not out[:, 1005:].any()


def test_what_does_not_fit_is_refused() -> None:
    """A kernel would read beyond a table or a matrix."""
    codes = torch.zeros(2, 8, dtype=torch.uint8)
    table, scale = torch.zeros(1, 16), torch.ones(2, 1)
    good = Tables(codes, table, scale)
    for wrong in (
        good._replace(codes=codes.int()),
        good._replace(table=torch.zeros(1, 5)),
        good._replace(table=torch.zeros(3, 16)),
        good._replace(scale=torch.ones(2, 4)),
        good._replace(codes=codes + 16),
    ):
        with pytest.raises(EngineError, match="linear_tables takes"):
            OP.reference(wrong)
    with pytest.raises(EngineError, match="a bias of 2 numbers"):
        OP.reference(good, torch.zeros(3))


def test_a_format_has_blocks_that_divide_rows_and_blocks() -> None:
    """Turns red when a block goes on in the next row, or scales outweigh codes."""
    assert TableFormat.holding(8, 576, 128) == TableFormat(8, 64)
    assert TableFormat.holding(4, 100, 100) == TableFormat(4, 100)
    assert TableFormat.holding(4, 100, 64) is None
    assert TableFormat.holding(8, 66, 66) is None
    for each in (TableFormat(8, 64), TableFormat(3, 128, own_tables=True)):
        assert TableFormat.named(each.name) == each
    assert TableFormat.named("int4-g128-sym") is None
