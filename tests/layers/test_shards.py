"""Layers of ranks: shares, and sums that equal those of the uncut matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.ranks import on_ranks
from tests.pairs import BY_PAIRS

from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.compute.layers import LayerFactory
from quire.compute.quantization import QuantizedFormats
from quire.config.kv_layout import KVFormat, KVLayout
from quire.config.shard import ONE_RANK, Shard, Share
from quire.ops import build_op_set, force_isa
from quire.ops.distributed import ALONE, Collectives
from quire.ops.random_tensors import DTYPES, normal

REFERENCE = build_op_set(detect_platform(), force_isa("none"))
BEST = build_op_set(detect_platform())
SIZES = (2, 4)


def row_outputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: str | None,
    size: int,
    *,
    best: bool = False,
) -> list[torch.Tensor]:
    """y of a row projection [O, I] on each rank; x [T, I] as a column projection shares it."""
    ops = BEST if best else REFERENCE

    def work(shard: Shard, collectives: Collectives) -> torch.Tensor:
        factory = LayerFactory(
            ops, {}, weight.dtype, torch.device("cpu"), 16,
            QuantizedFormats(quantization, ops), shard=shard, collectives=collectives,
        )  # fmt: skip
        outputs, inputs = weight.shape
        layer = factory.row(inputs, outputs, bias=bias is not None)
        for part, whole in (("weight", weight), ("bias", bias)):
            if whole is not None:
                cut = layer.weights.cut(part)
                layer.weights.load(part, whole if cut is None else cut.of(whole))
        layer.weights.finish()
        return layer(x.chunk(shard.size, dim=1)[shard.rank])

    return [work(ONE_RANK, ALONE)] if size == 1 else on_ranks(size, work)


def uneven_rows(generator: torch.Generator, rows: int, depth: int) -> torch.Tensor:
    """Rows whose largest number is in any part; some of zeros, NaN and infinity."""
    x = normal(generator, rows, depth)
    x *= 10.0 ** torch.randint(-3, 3, (rows, depth // 8), generator=generator).repeat(1, 8)
    x[1 % rows], x[2 % rows, 3], x[3 % rows, depth - 1] = 0.0, torch.nan, torch.inf
    return x


@settings(max_examples=15)
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 40),
    eighths=st.integers(1, 30),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_int8_sums_over_ranks_equal_the_uncut_ones_to_the_bit(
    rows: int, outputs: int, eighths: int, dtype: torch.dtype, with_bias: bool, seed: int
) -> None:
    """Turns red when scales of weights or of activations are those of a part, when sums are
    rounded before they are added, and when a bias is added twice."""
    generator = torch.Generator().manual_seed(seed)
    depth = 8 * eighths
    x = uneven_rows(generator, rows, depth).to(dtype)
    weight = uneven_rows(generator, outputs, depth).nan_to_num(1.0, 1.0, 1.0).to(dtype)
    bias = normal(generator, outputs, dtype=dtype) if with_bias else None
    (whole,) = row_outputs(x, weight, bias, "int8", 1)
    for size in SIZES:
        for got in row_outputs(x, weight, bias, "int8", size):
            torch.testing.assert_close(got, whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 9, 40, 530])
def test_int8_sums_of_kernels_equal_the_uncut_ones_to_the_bit(
    rows: int, dtype: torch.dtype
) -> None:
    """Turns red when a kernel rounds sums that are yet to be added, or scales a row of a part by
    the part's largest number: in few rows, which each thread quantizes, and in several blocks."""
    generator = torch.Generator().manual_seed(0)
    x = uneven_rows(generator, rows, 264).to(dtype)
    weight, bias = normal(generator, 50, 264, dtype=dtype), normal(generator, 50, dtype=dtype)
    (whole,) = row_outputs(x, weight, bias, "int8", 1, best=True)
    for got in row_outputs(x, weight, bias, "int8", 4, best=True):
        torch.testing.assert_close(got, whole, rtol=0, atol=0, equal_nan=True)


def test_sums_that_float32_does_not_hold_are_exact() -> None:
    """Turns red when partial sums of integers pass through float32."""
    x, weight = torch.ones(3, 4096), torch.ones(40, 4096)
    weight[:, ::3], x[1, 4000:] = 0.996, 0.25
    (whole,) = row_outputs(x, weight, None, "int8", 1)
    for got in row_outputs(x, weight, None, "int8", 2, best=True):
        assert torch.equal(got, whole)


@pytest.mark.parametrize("quantization", ["int4", "int4-sym", "int4-g64"])
@pytest.mark.parametrize("rows", [1, 9, 60, 300])
def test_int4_sums_of_kernels_equal_those_of_the_reference(quantization: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = uneven_rows(generator, rows, 256)
    weight, bias = normal(generator, 50, 256), normal(generator, 50)
    wanted = row_outputs(x, weight, bias, quantization, 2)
    for got, other in zip(
        row_outputs(x, weight, bias, quantization, 2, best=True), wanted, strict=True
    ):
        scale = x.nan_to_num(0.0, 0.0, 0.0).norm(dim=1, keepdim=True) * weight.norm(dim=1)
        near = (got - other).abs() <= 2e-6 * scale
        assert (near | (got.isnan() & other.isnan())).all()


@BY_PAIRS
@pytest.mark.parametrize("quantization", [None, "int4", "int4-sym", "int4-g64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sums_over_ranks_equal_the_uncut_ones(
    quantization: str | None, dtype: torch.dtype, size: int
) -> None:
    """Turns red when a group of a rank has a scale or zero point of its own."""
    generator = torch.Generator().manual_seed(0)
    x = uneven_rows(generator, 9, 256).nan_to_num(1.0, 1.0, 1.0).clamp(-8, 8).to(dtype)
    weight = uneven_rows(generator, 24, 256).nan_to_num(1.0, 1.0, 1.0).clamp(-8, 8).to(dtype)
    bias = normal(generator, 24, dtype=dtype)
    (whole,) = row_outputs(x.float(), weight.float(), bias.float(), quantization, 1)
    scale = x.float().norm(dim=1, keepdim=True) * weight.float().norm(dim=1)
    for got in row_outputs(x, weight, bias, quantization, size):
        rounding = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert ((got.float() - whole).abs() <= rounding * scale).all()


def test_a_scale_far_below_the_largest_is_the_same_on_a_rank() -> None:
    """Turns red when a rank keeps 16-bit scales of its part that the whole matrix rounds away."""
    weight = torch.full((3, 128), 1.0)
    weight[:, 64:] *= 2.0**-26
    weight[:, 64:96:2] *= -1.0
    x = torch.zeros(2, 128)
    x[:, 64:] = torch.arange(64)
    (whole,) = row_outputs(x, weight, None, "int4", 1)
    for got in row_outputs(x, weight, None, "int4", 2):
        assert torch.equal(got, whole)


def test_shares() -> None:
    assert Shard(1, 2).equal(6, "things") == Share(6, (range(3, 6),))
    assert Share.joined([Shard(1, 2).equal(4, "a"), Shard(1, 2).equal(2, "b")]) == Share(
        6, (range(2, 4), range(5, 6))
    )
    assert Shard(1, 2).equal(4, "heads").times(8).ranges == (range(16, 32),)
    assert [Shard(rank, 4).kv_heads(2).ranges[0][0] for rank in range(4)] == [0, 0, 1, 1]
    assert [Shard(rank, 4).kv_heads(1).count for rank in range(4)] == [1, 1, 1, 1]
    assert [Shard(rank, 4).vocabulary(10).count for rank in range(4)] == [3, 3, 3, 1]
    assert Share.whole(3).is_whole and not Shard(0, 2).vocabulary(3).is_whole


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} of {size}: use a rank from 0 to size - 1"):
        Shard(rank, size)


@pytest.mark.parametrize(("kv_heads", "size", "own"), [(8, 2, 4), (2, 4, 1), (1, 4, 1)])
def test_the_pool_of_a_rank_has_its_heads(kv_heads: int, size: int, own: int) -> None:
    """Turns red when a rank takes the memory of all heads, or blocks have other tokens on ranks."""
    for kv_dtype in ("bfloat16", "int8"):
        whole = KVLayout.of_windows([None, 8], 16, KVFormat.plain(kv_heads, 64, kv_dtype))
        layout = whole.of_rank(Shard(0, size))
        assert layout == KVLayout.of_windows([None, 8], 16, KVFormat.plain(own, 64, kv_dtype))
        assert layout.page_bytes * kv_heads == whole.page_bytes * own
