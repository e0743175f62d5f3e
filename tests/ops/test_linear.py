"""Linear kernels: equal to the reference on any shape, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pairs import BY_PAIRS
from tests.profiles import examples

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Case, PackedMatrix, Provider, Team
from quire.ops.check import compare
from quire.ops.random_tensors import DTYPES, normal

OP = ALL_OPS["linear"]
PLATFORM = detect_platform()
Pack = Callable[..., PackedMatrix]


@pytest.fixture(params=OP.providers, ids=lambda provider: provider.name)
def pack(request: pytest.FixtureRequest) -> Pack:
    reason = request.param.unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(f"{request.param.name}: {reason}")
    return request.param.load()


@examples(40)
@given(
    rows=st.integers(0, 130),
    outputs=st.integers(1, 400),
    depth=st.integers(1, 300),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_the_reference(
    rows: int,
    outputs: int,
    depth: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    bias: bool,
    seed: int,
) -> None:
    """Turns red on a wrong tail of rows, outputs or depth, and on a column out of its place."""
    generator = torch.Generator().manual_seed(seed)
    x = normal(generator, rows, depth + 3, dtype=dtypes[0])[:, :depth]
    weight = normal(generator, outputs, depth, dtype=dtypes[1]) / depth**0.5
    added = normal(generator, outputs, dtype=dtypes[1]) if bias else None
    ids = torch.randint(outputs, (5,), generator=generator)
    case = Case("random", (x, weight, added, ids))
    for provider in OP.providers:
        if provider.unavailable(PLATFORM) is None:
            difference = compare(OP, provider.load(), case)
            assert difference is None, f"{provider.name}: {difference}"


@BY_PAIRS
@pytest.mark.parametrize(("outputs", "depth"), [(1, 1), (33, 7), (257, 129), (640, 512)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", OP.providers, ids=lambda provider: provider.name)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    provider: Provider, outputs: int, depth: int, dtype: torch.dtype
) -> None:
    """Batched = alone, and one thread = two. Turns red when the order of a sum depends on the tile
    or on the threads."""
    if (reason := provider.unavailable(PLATFORM)) is not None:
        pytest.skip(f"{provider.name}: {reason}")
    generator = torch.Generator().manual_seed(0)
    weight = normal(generator, outputs, depth, dtype=dtype)
    bias = normal(generator, outputs, dtype=dtype)
    x = normal(generator, 500, depth, dtype=dtype)
    matrix = provider.load()(weight, bias)
    alone = torch.cat([matrix(row) for row in x.split(1)])
    for threads in (1, 2):
        matrix = provider.load(Team(threads))(weight, bias)
        for rows in (*range(1, 131), 239, 241, 500):
            assert torch.equal(matrix(x[:rows]), alone[:rows]), f"{rows} rows, {threads} threads"


@pytest.mark.parametrize("provider", OP.providers, ids=lambda provider: provider.name)
def test_long_rows_are_computed_in_blocks_with_the_same_bits(provider: Provider) -> None:
    """Turns red when a block of rows that fills the caches ends in the wrong place, or when threads
    that share the rows of a few panels leave some out."""
    if (reason := provider.unavailable(PLATFORM)) is not None:
        pytest.skip(f"{provider.name}: {reason}")
    generator = torch.Generator().manual_seed(0)
    depth = 16_385
    weight, x = normal(generator, 33, depth), normal(generator, 200, depth)
    for dtype in (torch.float32, torch.bfloat16):
        rows = x.to(dtype)
        alone = provider.load()(weight.to(dtype))
        expected = torch.cat([alone(row) for row in rows.split(1)])
        for threads in (1, 5):
            matrix = provider.load(Team(threads))(weight.to(dtype))
            assert torch.equal(matrix(rows), expected), f"{dtype}, {threads} threads"


def test_a_product_beyond_the_range_of_the_result_is_infinite(pack: Pack) -> None:
    """Turns red when an instruction for bf16 saturates or gives NaN where float32 overflows."""
    big = torch.full((1, 4), 3e38, dtype=torch.bfloat16)
    assert pack(big)(big).item() == float("inf")
    assert pack(-big)(big).item() == float("-inf")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_bit_for_bit(pack: Pack, dtype: torch.dtype) -> None:
    """Turns red when a tied embedding reads another row than the one that was packed."""
    weight = normal(torch.Generator().manual_seed(0), 71, 19, dtype=dtype)
    weight[3, 4], weight[3, 5] = float("nan"), float("inf")
    matrix = pack(weight.t().contiguous().t())
    for ids in (torch.arange(71), torch.tensor([70, 0, 3], dtype=torch.int32)):
        got, bits = matrix.rows(ids), torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(got.view(bits), weight[ids.long()].view(bits))


@pytest.mark.parametrize("wrong", [-1, 71])
def test_an_id_outside_the_table_is_refused(pack: Pack, wrong: int) -> None:
    """Turns red when a wrong token id reads another tensor's memory."""
    matrix = pack(torch.zeros(71, 19))
    with pytest.raises(EngineError, match="code 3"):
        matrix.rows(torch.tensor([0, wrong]))


def test_a_row_that_is_not_finite_stays_alone(pack: Pack) -> None:
    """Turns red when NaN of one request reaches another through a shared tile."""
    generator = torch.Generator().manual_seed(0)
    matrix = pack(normal(generator, 50, 40))
    x = normal(generator, 9, 40)
    clean = matrix(x)
    x[4, 7] = float("nan")
    got = matrix(x)
    assert got[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(got[others], clean[others])


def test_rows_of_another_size_are_refused(pack: Pack) -> None:
    """Turns red when a layer reads beyond the rows that it was given."""
    for x in (torch.zeros(4, 19), torch.zeros(2, 3, 10), torch.zeros(4, 21)):
        with pytest.raises(EngineError, match="20 inputs"):
            pack(torch.zeros(71, 20))(x)


def test_shapes_that_break_the_contract_are_refused(pack: Pack) -> None:
    """Turns red when a kernel adds a bias beyond its end, or divides by no outputs."""
    for weight, bias, message in (
        (torch.zeros(6, 5), torch.zeros(5), "a bias of 6"),
        (torch.zeros(6, 5), torch.zeros(6, 1), "a bias of 6"),
        (torch.zeros(0, 5), None, "at least one output"),
        (torch.zeros(6, 0), None, "at least one output"),
        (torch.zeros(5), None, "at least one output"),
    ):
        for make in (pack, OP.reference):
            with pytest.raises(EngineError, match=message):
                make(weight, bias)


@examples(30)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 150),
    depth=st.integers(1, 200),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 2**31),
)
def test_a_result_in_float32_is_what_is_rounded_otherwise(
    rows: int, outputs: int, depth: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    """Turns red when logits are rounded to 16 bits on their way, or summed in another way than
    other outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = normal(generator, rows, depth, dtype=dtypes[0])
    weight = normal(generator, outputs, depth, dtype=dtypes[1]) / depth**0.5
    bias = normal(generator, outputs, dtype=dtypes[1])
    exact = x.double() @ weight.double().t() + bias.double()
    for provider in OP.providers:
        if provider.unavailable(PLATFORM) is None:
            matrix = provider.load()(weight, bias)
            wide = matrix(x, torch.float32)
            assert wide.dtype == torch.float32
            assert torch.equal(wide.to(x.dtype), matrix(x))
            assert torch.allclose(wide.double(), exact, rtol=2e-5, atol=2e-5)
    plain = OP.reference(weight, bias)(x, torch.float32)
    assert torch.allclose(plain.double(), exact, rtol=2e-5, atol=2e-5)


def test_a_bias_may_have_a_stride(pack: Pack) -> None:
    """Turns red when the elements between those of a bias are added."""
    bias = torch.arange(12.0)[::2]
    assert torch.equal(pack(torch.zeros(6, 5), bias)(torch.zeros(1, 5))[0], bias)


def test_inputs_of_three_dimensions(pack: Pack) -> None:
    """Turns red when leading dimensions are lost."""
    generator = torch.Generator().manual_seed(0)
    matrix = pack(normal(generator, 6, 8))
    x = normal(generator, 3, 8, 5).transpose(1, 2)
    assert torch.equal(matrix(x), matrix(x.reshape(15, 8)).view(3, 5, 6))
