"""Tile instructions (AMX) do what Intel's manual says, by the processor or emulated.

The kernels on tiles are tested on the emulation where the processor has none (test_tiles.py); this
holds the emulation, or the processor, to a model in exact fractions.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.tile_emulator import has_tiles, tiles_unavailable
from tests.profiles import examples
from tests.waiting import WAIT_S

pytestmark = pytest.mark.timeout(900)  # compiling takes minutes on a slow machine

SMALLEST = Fraction(2) ** -126
"""The smallest float32 that is not denormal."""

if (_REASON := tiles_unavailable()) is not None:
    pytest.skip(_REASON, allow_module_level=True)


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


@examples(12)
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


@examples(20)
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
    """Turns red when a kernel that a processor would stop passes the tests here. A processor with
    tiles stops it without giving a reason."""
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
        timeout=WAIT_S,
    )
    assert result.returncode < 0
    assert has_tiles() or breach in result.stderr
