"""Linear kernels on tile registers (AMX): equal to the reference and to other instruction sets.

Without such a processor the instructions are emulated (tile_emulator.cpp); the library is the one
that a processor with them runs.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.tile_emulator import (
    AMX,
    TILE_OPS,
    Arguments,
    has_tiles,
    tile_provider,
    tile_weights,
    tiles_unavailable,
)
from tests.profiles import examples

from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.config import env
from quire.ops import ALL_OPS, Case, Op, Team, build_op_set, force_isa
from quire.ops.check import check_provider, compare
from quire.ops.compile import build_hash, library_path
from quire.ops.linear.int4.cases import int4_weight
from quire.ops.linear.int4.contract import GROUP_SIZES
from quire.ops.linear.int8.cases import int8_weight
from quire.ops.native import binding as native
from quire.ops.random_tensors import DTYPES, normal

LINEAR, INT8, INT4 = TILE_OPS
pytestmark = pytest.mark.timeout(900)  # compiling takes minutes on a slow machine

PLATFORM = detect_platform()
if (_REASON := tiles_unavailable()) is not None:
    pytest.skip(_REASON, allow_module_level=True)


def test_the_library_is_compiled_where_the_compiler_knows_tiles() -> None:
    """Turns red when the kernels for tiles stop compiling, or the tests here meet old ones."""
    library = ctypes.CDLL(str(library_path(AMX)))
    library.quire_build_hash.restype = ctypes.c_char_p
    assert library.quire_build_hash().decode() == build_hash(AMX)


@pytest.mark.parametrize("op", TILE_OPS, ids=lambda op: op.name)
def test_every_case_of_the_operation_equals_the_reference(tiles: ctypes.CDLL, op: Op) -> None:
    """Turns red when the library on tiles computes something else."""
    before = tiles.emulator_count()
    report = check_provider(op, tile_provider(op))
    assert report.ok, report.failures
    assert has_tiles() or tiles.emulator_count() > before


@examples(25)
@given(
    rows=st.integers(0, 130),
    outputs=st.integers(1, 200),
    depth=st.integers(1, 300),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_bf16_shape_equals_the_reference(
    tiles: ctypes.CDLL, rows: int, outputs: int, depth: int, bias: bool, seed: int
) -> None:
    """Turns red on a wrong tail of rows, outputs or depth, and on weights of another panel, which
    may be infinite, behind the last pair."""
    generator = torch.Generator().manual_seed(seed)
    x = normal(generator, rows, depth + 3, dtype=torch.bfloat16)[:, :depth]
    weight = normal(generator, outputs, depth, dtype=torch.bfloat16) / depth**0.5
    added = normal(generator, outputs, dtype=torch.bfloat16) if bias else None
    ids = torch.randint(outputs, (5,), generator=generator)
    assert (
        compare(LINEAR, tile_provider(LINEAR).load(), Case("random", (x, weight, added, ids)))
        is None
    )


@examples(25)
@given(
    rows=st.integers(1, 130),
    outputs=st.integers(1, 200),
    depth=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_int8_has_the_bits_of_every_other_instruction_set(
    tiles: ctypes.CDLL,
    rows: int,
    outputs: int,
    depth: int,
    dtype: torch.dtype,
    bias: bool,
    seed: int,
) -> None:
    """Turns red when a machine with tiles answers another than one without."""
    generator = torch.Generator().manual_seed(seed)
    weight, scale = int8_weight(generator, outputs, depth)
    arguments = weight, scale, normal(generator, outputs) if bias else None
    compare_bits(INT8, arguments, normal(generator, rows, depth + 3)[:, :depth].to(dtype))


@examples(25)
@given(
    rows=st.integers(1, 130),
    outputs=st.integers(1, 150),
    groups=st.integers(1, 4),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(DTYPES),
    with_zero=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_int4_has_the_bits_of_every_other_instruction_set(
    tiles: ctypes.CDLL,
    rows: int,
    outputs: int,
    groups: int,
    group_size: int,
    dtype: torch.dtype,
    with_zero: bool,
    bias: bool,
    seed: int,
) -> None:
    """Turns red when a group on tiles takes another's lines, scale or zero point."""
    generator = torch.Generator().manual_seed(seed)
    depth = groups * group_size
    weight, scale, zero = int4_weight(generator, outputs, depth, group_size)
    added = normal(generator, outputs) if bias else None
    arguments = weight, scale, zero if with_zero else None, added
    compare_bits(INT4, arguments, normal(generator, rows, depth + 3)[:, :depth].to(dtype))


def compare_bits(op: Op, arguments: Arguments, x: torch.Tensor) -> None:
    got = tile_provider(op).load()(*arguments)(x)
    for other in op.providers:
        if other.unavailable(PLATFORM) is None:
            assert torch.equal(got, other.load()(*arguments)(x)), other.name


def test_bf16_stays_close_to_the_products_of_pairs(tiles: ctypes.CDLL) -> None:
    """Turns red when tiles lose precision: both are float32 sums of exact products, in another
    order, so they differ by a few roundings of the sum of magnitudes."""
    other = LINEAR.provider("cpu_avx512_bf16")
    assert other is not None
    generator = torch.Generator().manual_seed(0)
    weight = normal(generator, 100, 3072, dtype=torch.bfloat16)
    x = normal(generator, 40, 3072, dtype=torch.bfloat16)
    exact_sums = x.double() @ weight.double().t()
    magnitudes = x.double().abs() @ weight.double().abs().t()
    results = tile_provider(LINEAR).load()(weight)(x), other.load()(weight)(x)
    for result in results:
        rounding = exact_sums.abs() * 2**-8
        assert ((result.double() - exact_sums).abs() <= magnitudes * 2**-20 + rounding).all()
    assert (results[0] == results[1]).double().mean() > 0.98


@pytest.mark.parametrize(("outputs", "depth"), [(1, 32), (33, 96), (97, 224), (64, 1024)])
@pytest.mark.parametrize("op", TILE_OPS, ids=lambda op: op.name)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    tiles: ctypes.CDLL, op: Op, outputs: int, depth: int
) -> None:
    """Batched = alone, and one thread = three. Turns red when a sum depends on how many rows the
    tiles are configured for, on rows beside it, or on the threads."""
    generator = torch.Generator().manual_seed(0)
    x = normal(generator, 300, depth, dtype=torch.bfloat16)
    arguments = tile_weights(op, generator, outputs, depth)
    alone = torch.cat([tile_provider(op).load()(*arguments)(row) for row in x[:131].split(1)])
    together = tile_provider(op).load()(*arguments)(x)
    assert torch.equal(together[:131], alone)
    for threads in (1, 3):
        matrix = tile_provider(op).load(Team(threads))(*arguments)
        for rows in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 100, 129, 255, 257, 300):
            assert torch.equal(matrix(x[:rows]), together[:rows]), f"{rows} rows, {threads} threads"


@pytest.mark.parametrize("op", [LINEAR, INT8], ids=lambda op: op.name)
def test_outputs_that_go_past_the_caches_have_the_same_bits(tiles: ctypes.CDLL, op: Op) -> None:
    """Turns red when 1 MiB of outputs is written elsewhere, or without bias."""
    generator = torch.Generator().manual_seed(0)
    outputs, depth = 2048, 32
    bias = normal(generator, outputs)
    x = normal(generator, 300, depth, dtype=torch.bfloat16)
    arguments = (*tile_weights(op, generator, outputs, depth), bias.to(x.dtype))
    for threads in (1, 3):
        matrix = tile_provider(op).load(Team(threads))(*arguments)
        assert torch.equal(matrix(x), torch.cat([matrix(part) for part in x.split(60)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", TILE_OPS, ids=lambda op: op.name)
def test_more_rows_than_may_wait_at_once(tiles: ctypes.CDLL, op: Op, dtype: torch.dtype) -> None:
    """Turns red when a block has more rows than there is room for, or a panel with few columns
    leaves some out."""
    generator = torch.Generator().manual_seed(0)
    outputs, depth = 150, 32
    x, other = normal(generator, 2200, depth, dtype=torch.bfloat16).split(1100)
    arguments = tile_weights(op, generator, outputs, depth)
    alone = tile_provider(op).load()(*arguments)
    expected = torch.cat([alone(part, dtype) for part in x.split(30)])
    for threads in (1, 3):
        matrix = tile_provider(op).load(Team(threads))(*arguments)
        for rows in (511, 513, 1023, 1025, 1100):
            matrix(other[:rows], dtype)  # what is left in memory that is not written
            assert torch.equal(matrix(x[:rows], dtype), expected[:rows]), f"{rows}, {threads}"


@pytest.mark.parametrize(("width", "depth"), [(1, 32), (33, 96), (64, 128), (1024, 32)])
@pytest.mark.parametrize("op", TILE_OPS, ids=lambda op: op.name)
def test_a_gated_layer_is_its_two_operations(
    tiles: ctypes.CDLL, op: Op, width: int, depth: int
) -> None:
    """Turns red when sums that wait become the outputs of the other panel of a pair."""
    other = ALL_OPS["activation_and_mul"].provider("cpu_avx512_bf16")
    assert other is not None
    apply = other.load()
    generator = torch.Generator().manual_seed(0)
    x = normal(generator, 300, depth, dtype=torch.bfloat16)
    arguments = tile_weights(op, generator, 2 * width, depth)
    bias = normal(generator, 2 * width, dtype=torch.bfloat16)
    expected = apply(tile_provider(op).load()(*arguments, bias=bias)(x), "silu")
    for threads in (1, 3):
        matrix = tile_provider(op).load(Team(threads))(*arguments, bias=bias, gate="silu")
        for rows in (1, 2, 15, 16, 17, 33, 64, 65, 129, 255, 300):
            assert torch.equal(matrix(x[:rows]), expected[:rows]), f"{rows} rows, {threads} threads"


def test_blocks_of_long_rows_have_the_same_bits(tiles: ctypes.CDLL) -> None:
    """Turns red when a block of rows that fills the caches ends in the wrong place."""
    generator = torch.Generator().manual_seed(0)
    weight = normal(generator, 33, 16_385, dtype=torch.bfloat16)
    x = normal(generator, 200, 16_385, dtype=torch.bfloat16)
    matrix = tile_provider(LINEAR).load(Team(3))(weight)
    assert torch.equal(matrix(x)[150:], matrix(x[150:]))


def test_what_is_not_finite_stays_in_its_row_and_column(tiles: ctypes.CDLL) -> None:
    """Turns red when rows beyond a tile, or lines behind a panel, reach a sum."""
    generator = torch.Generator().manual_seed(0)
    weight = normal(generator, 96, 40, dtype=torch.bfloat16)
    x = normal(generator, 49, 40, dtype=torch.bfloat16)
    clean = tile_provider(LINEAR).load()(weight)(x)
    x[20, 7], weight[40, 3], weight[32] = float("nan"), float("inf"), float("nan")
    got = tile_provider(LINEAR).load()(weight)(x)
    assert got[20].isnan().all() and got[:, 32].isnan().all() and not got[:, 40].isfinite().any()
    rows = [row for row in range(49) if row != 20]
    columns = [column for column in range(96) if column not in (32, 40)]
    assert torch.equal(got[rows][:, columns], clean[rows][:, columns])


def test_tiles_are_free_after_a_call(tiles: ctypes.CDLL) -> None:
    """Turns red when a thread keeps its tiles configured: their next user would meet ours,
    and the system would save 8 KiB at every switch."""
    generator = torch.Generator().manual_seed(0)
    for op in TILE_OPS:
        matrix = tile_provider(op).load()(*tile_weights(op, generator, 70, 64))
        matrix(torch.ones(40, 64, dtype=torch.bfloat16))
        config = ctypes.create_string_buffer(b"\1" * 64, 64)
        tiles.probe_configuration(config)
        assert config.raw == bytes(64)


# Messages on processors without tiles


def test_a_processor_without_tiles_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when QUIRE_CPU_ISA=amx ends in an illegal instruction, or in another kernel."""
    if has_tiles():
        pytest.skip("the processor has tiles")
    monkeypatch.setenv("QUIRE_CPU_ISA", "amx")
    with pytest.raises(ConfigError, match=r"'cpu_amx'.*lacks amx_tile, amx_bf16, amx_int8"):
        build_op_set(PLATFORM, force_isa(env.cpu_isa()))


def test_a_system_that_gives_no_tiles_is_named() -> None:
    """Turns red when the system's refusal is overlooked, and the first tile instruction kills."""
    if has_tiles():
        pytest.skip("the processor has tiles")
    reason = native._open.__wrapped__("amx")
    assert "the system gives this process no tile registers: " in reason
