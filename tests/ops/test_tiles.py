"""Linear kernels on tile registers (AMX): what the instructions mean, and the kernels over them.

Without such a processor the instructions are emulated (tile_emulator.cpp), and the library is the
one that a processor with them runs; with one, the same tests hold it to the manual.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.tile_emulator import AMX, build_emulator, emulation, missing

from quire.errors import ConfigError
from quire.ops import ALL_OPS, Case, Op, Team, native, select
from quire.ops.check import check_provider, compare
from quire.ops.compile import build_hash, library_path
from quire.ops.inputs import DTYPES, normal
from quire.ops.linear import cpu as linear_cpu
from quire.ops.linear_int8 import cpu as linear_int8_cpu
from quire.ops.linear_int8.inputs import int8_weight
from quire.ops.operation import Provider
from quire.ops.team import ALONE
from quire.platform import detect_platform

LINEAR, INT8 = ALL_OPS["linear"], ALL_OPS["linear_int8"]
PLATFORM = detect_platform()
SMALLEST = Fraction(2) ** -126
"""The smallest float32 that is not denormal."""

if (_REASON := missing()) is not None:
    pytest.skip(_REASON, allow_module_level=True)


@pytest.fixture(scope="module")
def emulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(scope="module")
def tiles(emulator_library: Path) -> Iterator[ctypes.CDLL]:
    with emulation(emulator_library) as emulator:
        yield emulator


def provider(op: Op) -> Provider:
    """The provider on tiles, without the question whether the processor has them."""
    bind = linear_cpu.bind if op is LINEAR else linear_int8_cpu.bind
    library = ctypes.CDLL(str(library_path(AMX)))

    def load(team: Team = ALONE) -> Callable[..., Any]:
        return bind(native.NativeLibrary("amx", library, team))

    return Provider("cpu_amx", lambda platform: None, load)


def test_the_library_is_compiled_where_the_compiler_knows_tiles() -> None:
    """Turns red when the kernels for tiles stop compiling, or the tests here meet old ones."""
    library = ctypes.CDLL(str(library_path(AMX)))
    library.quire_build_hash.restype = ctypes.c_char_p
    assert library.quire_build_hash().decode() == build_hash(AMX)


# What the instructions mean


def configuration(rows: int, row_bytes: int, lines: int) -> bytearray:
    """Tile 0 of rows × row_bytes, 1 of rows × 4 lines, 2 of lines × row_bytes."""
    config = bytearray(64)
    config[0] = 1
    for tile, (count, size) in enumerate(
        ((rows, row_bytes), (rows, 4 * lines), (lines, row_bytes))
    ):
        struct.pack_into("<H", config, 16 + 2 * tile, size)
        config[48 + tile] = count
    return config


def multiply(
    tiles: ctypes.CDLL, kind: int, sums: np.ndarray, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """One instruction on tiles of the sizes of these arrays."""
    config = configuration(len(sums), 4 * sums.shape[1], len(b))
    buffers = [np.zeros((16, 64), np.uint8) for _ in range(3)]
    for buffer, values in zip(buffers, (sums, a, b), strict=True):
        content = np.ascontiguousarray(values).view(np.uint8)
        buffer[: content.shape[0], : content.shape[1]] = content
    tiles.probe_product(
        kind,
        (ctypes.c_char * 64).from_buffer(config),
        *(buffer.ctypes.data_as(ctypes.c_void_p) for buffer in buffers),
    )
    out = buffers[0][: len(sums), : 4 * sums.shape[1]]
    assert not buffers[0][len(sums) :].any(), "rows beyond the configuration were written"
    return np.ascontiguousarray(out).view(sums.dtype)


def to_float32(x: Fraction) -> Fraction:
    """Rounded to nearest even with 24 bits; what is below 2^-126 after that is zero."""
    if x == 0:
        return x
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(x / unit) * unit
    return rounded if abs(rounded) >= SMALLEST else Fraction(0)


def exact(x: np.ndarray) -> list[list[Fraction]]:
    """float32 values, denormals as zeros."""
    values = [[Fraction(float(value)) for value in row] for row in x]
    return [[value if abs(value) >= SMALLEST else Fraction(0) for value in row] for row in values]


def model_of_tdpbf16ps(sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intel SDM volume 2, TDPBF16PS, in exact fractions; a [M, 2 K], b [K, 2 N] as float32."""
    start, left, right = exact(sums), exact(a), exact(b)
    out = np.zeros_like(sums)
    for m, n in np.ndindex(sums.shape):
        chains = [Fraction(0), Fraction(0)]
        for k in range(len(b)):
            for odd in (0, 1):
                product = left[m][2 * k + odd] * right[k][2 * n + odd]
                chains[odd] = to_float32(chains[odd] + product)
        out[m, n] = float(to_float32(start[m][n] + to_float32(chains[0] + chains[1])))
    return out


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 cut to the values of bf16, and their bits."""
    return np.ascontiguousarray(x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 16),
    columns=st.integers(1, 16),
    pairs=st.integers(1, 16),
    scale=st.sampled_from([0, -19, -38]),
    seed=st.integers(0, 2**31),
)
def test_tdpbf16ps_is_what_the_manual_says(
    tiles: ctypes.CDLL, rows: int, columns: int, pairs: int, scale: int, seed: int
) -> None:
    """Turns red when the emulation rounds, orders or flushes otherwise than the instruction. Scales
    of 1e-19 have products, and 1e-38 elements, on both sides of the smallest normal float32."""
    numbers = np.random.default_rng(seed)
    a = bf16(numbers.normal(size=(rows, 2 * pairs)) * 10.0**scale)
    b = bf16(numbers.normal(size=(pairs, 2 * columns)) * (10.0**scale if scale > -38 else 1.0))
    sums = (numbers.normal(size=(rows, columns)) * 10.0 ** max(2 * scale, -38)).astype(np.float32)
    got = multiply(tiles, 0, sums, a, b)
    assert np.array_equal(got, model_of_tdpbf16ps(sums, widened(a), widened(b)))


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from([(1, np.int8, np.int8), (2, np.int8, np.uint8), (3, np.uint8, np.int8)]),
    rows=st.integers(1, 16),
    columns=st.integers(1, 16),
    quads=st.integers(1, 16),
    seed=st.integers(0, 2**31),
)
def test_products_of_bytes_are_exact_and_wrap_around(
    tiles: ctypes.CDLL, kind: tuple[int, type, type], rows: int, columns: int, quads: int, seed: int
) -> None:
    """Turns red when a sign is taken from the wrong operand, or a sum saturates."""
    code, left, right = kind
    numbers = np.random.default_rng(seed)

    def draw(dtype: type, *shape: int) -> np.ndarray:
        limits = np.iinfo(dtype)
        return numbers.integers(limits.min, limits.max, shape, dtype, endpoint=True)

    a, b = draw(left, rows, 4 * quads), draw(right, quads, 4 * columns)
    sums = draw(np.int32, rows, columns)
    columns_of_b = b.reshape(quads, columns, 4).transpose(1, 0, 2).reshape(columns, 4 * quads)
    expected = sums.astype(np.int64) + a.astype(np.int64) @ columns_of_b.astype(np.int64).T
    assert np.array_equal(multiply(tiles, code, sums, a, b), expected.astype(np.int32))


BREACHES = {
    "more than 16 rows": "config[48] = 17",
    "a row of more than 64 bytes": "config[16] = 65",
    "rows without bytes, or bytes without rows": "config[48] = 0",
    "a palette other than 1": "config[0] = 2",
    "a reserved byte": "config[2] = 1",
    "a tile that is not configured": "",
    "no configuration": "config[0] = 0",
    "sizes of tiles that do not fit": "config[50] = 3; product = True",
}
BREACH = """
import ctypes, sys
emulator = ctypes.CDLL(sys.argv[1])
emulator.emulator_install()
config, product = bytearray.fromhex(sys.argv[2]), False
exec(sys.argv[3])
raw = (ctypes.c_char * 64).from_buffer(config)
if product:
    tile = (ctypes.c_char * 1024)()
    emulator.probe_product(0, raw, tile, tile, tile)
emulator.probe_configure(raw)
emulator.probe_zero_tile_7()
"""


@pytest.mark.parametrize("breach", BREACHES)
def test_the_emulation_refuses_what_the_processor_refuses(
    emulator_library: Path, breach: str
) -> None:
    """Turns red when a kernel that a processor would stop passes the tests here."""
    result = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            BREACH,
            str(emulator_library),
            configuration(4, 64, 16).hex(),
            BREACHES[breach],
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode < 0 and breach in result.stderr


# The kernels


@pytest.mark.parametrize("op", [LINEAR, INT8], ids=lambda op: op.name)
def test_every_case_of_the_operation_equals_the_reference(tiles: ctypes.CDLL, op: Op) -> None:
    """Turns red when the library on tiles computes something else."""
    before = tiles.emulator_count()
    report = check_provider(op, provider(op))
    assert report.ok, report.failures
    assert PLATFORM.cpu.has(*AMX.features) or tiles.emulator_count() > before


@settings(max_examples=25, deadline=None)
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
    assert compare(LINEAR, provider(LINEAR).load(), Case("random", (x, weight, added, ids))) is None


@settings(max_examples=25, deadline=None)
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
    x = normal(generator, rows, depth + 3)[:, :depth].to(dtype)
    got = provider(INT8).load()(*arguments)(x)
    for other in INT8.providers:
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
    results = provider(LINEAR).load()(weight)(x), other.load()(weight)(x)
    for result in results:
        rounding = exact_sums.abs() * 2**-8
        assert ((result.double() - exact_sums).abs() <= magnitudes * 2**-20 + rounding).all()
    assert (results[0] == results[1]).double().mean() > 0.98


@pytest.mark.parametrize(("outputs", "depth"), [(1, 1), (33, 7), (97, 129), (64, 1024)])
@pytest.mark.parametrize("op", [LINEAR, INT8], ids=lambda op: op.name)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    tiles: ctypes.CDLL, op: Op, outputs: int, depth: int
) -> None:
    """Batched = alone, and one thread = three. Turns red when a sum depends on how many rows the
    tiles are configured for, on rows beside it, or on the threads."""
    generator = torch.Generator().manual_seed(0)
    x = normal(generator, 300, depth, dtype=torch.bfloat16)
    if op is INT8:
        arguments = *int8_weight(generator, outputs, depth), normal(generator, outputs)
    else:
        arguments = tuple(normal(generator, outputs, size, dtype=x.dtype) for size in (depth,))
    alone = torch.cat([provider(op).load()(*arguments)(row) for row in x[:131].split(1)])
    together = provider(op).load()(*arguments)(x)
    assert torch.equal(together[:131], alone)
    for threads in (1, 3):
        matrix = provider(op).load(Team(threads))(*arguments)
        for rows in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 100, 129, 255, 257, 300):
            assert torch.equal(matrix(x[:rows]), together[:rows]), f"{rows} rows, {threads} threads"


def test_blocks_of_long_rows_have_the_same_bits(tiles: ctypes.CDLL) -> None:
    """Turns red when a block of rows that fills the caches ends in the wrong place."""
    generator = torch.Generator().manual_seed(0)
    weight = normal(generator, 33, 16_385, dtype=torch.bfloat16)
    x = normal(generator, 200, 16_385, dtype=torch.bfloat16)
    matrix = provider(LINEAR).load(Team(3))(weight)
    assert torch.equal(matrix(x)[150:], matrix(x[150:]))


def test_what_is_not_finite_stays_in_its_row_and_column(tiles: ctypes.CDLL) -> None:
    """Turns red when rows beyond a tile, or lines behind a panel, reach a sum."""
    generator = torch.Generator().manual_seed(0)
    weight = normal(generator, 96, 40, dtype=torch.bfloat16)
    x = normal(generator, 49, 40, dtype=torch.bfloat16)
    clean = provider(LINEAR).load()(weight)(x)
    x[20, 7], weight[40, 3], weight[32] = float("nan"), float("inf"), float("nan")
    got = provider(LINEAR).load()(weight)(x)
    assert got[20].isnan().all() and got[:, 32].isnan().all() and not got[:, 40].isfinite().any()
    rows = [row for row in range(49) if row != 20]
    columns = [column for column in range(96) if column not in (32, 40)]
    assert torch.equal(got[rows][:, columns], clean[rows][:, columns])


def test_tiles_are_free_after_a_call(tiles: ctypes.CDLL) -> None:
    """Turns red when a thread keeps its tiles configured: whoever uses them next would meet ours,
    and the system would save 8 KiB at every switch."""
    for op in (LINEAR, INT8):
        weights = (torch.ones(70, 64, dtype=torch.bfloat16),)
        if op is INT8:
            weights = (torch.ones(70, 64, dtype=torch.int8), torch.ones(70))
        provider(op).load()(*weights)(torch.ones(40, 64, dtype=torch.bfloat16))
        config = ctypes.create_string_buffer(b"\1" * 64, 64)
        tiles.probe_configuration(config)
        assert config.raw == bytes(64)


# What is said where there are none


def test_a_processor_without_tiles_is_named() -> None:
    """Turns red when QUIRE_CPU_ISA=amx ends in an illegal instruction, or in another kernel."""
    if PLATFORM.cpu.has(*AMX.features):
        pytest.skip("the processor has tiles")
    with pytest.raises(ConfigError, match=r"'cpu_amx'.*lacks amx_tile, amx_bf16, amx_int8"):
        select(LINEAR, PLATFORM, "cpu_amx")


def test_a_system_that_gives_no_tiles_is_named() -> None:
    """Turns red when the system's refusal is overlooked, and the first tile instruction kills."""
    if PLATFORM.cpu.has(*AMX.features):
        pytest.skip("the processor has tiles")
    reason = native._open.__wrapped__("amx")
    assert "the system gives this process no tile registers: " in reason
