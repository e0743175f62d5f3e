"""The limits that other benchmarks stand beside, themselves beside what cores can do at most.

    python -m benchmarks.kernels.cpu_limits [--threads N] [--repeats N] [--output FILE]

Reads of 1 GB by turns: torch's sum over ordinary pages, its sum and its product with itself over
huge pages, and a loop of 64-byte loads over the same. Then 2048³ products by torch
(quire.entrypoints.bench.machine.LimitProbe) and loops of the same instructions that touch registers
only (cpu_limits.cpp), float32, bfloat16 and int8; each loop runs right after its product. The loops
need AVX-512 and a C++ compiler. Where the processor has tile registers (AMX), torch uses them, and
so do loops of their products.
"""

# ruff: isort: skip_file
# kernel_figures settles how threads wait before torch is imported
from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.kernels.kernel_figures import Call, Figure, figures_by_turns, run

import torch

from quire.entrypoints.bench.machine import MATMUL_SIZE, READ_BYTES, LimitProbe, Product
from quire.ops.native.huge_pages import map_huge_pages
from quire.ops.native.binding import native_unavailable
from quire.base.platform import detect_platform

SOURCE = Path(__file__).with_name("cpu_limits.cpp")
ROUNDS = 500_000
PRODUCTS_PER_ROUND: Mapping[Product, int] = {"fp32": 24 * 16, "bf16": 24 * 32, "int8": 24 * 64}
PRODUCTS_PER_TILE_ROUND: Mapping[Product, int] = {
    "bf16": 4 * 16 * 16 * 32,
    "int8": 4 * 16 * 16 * 64,
}
TILES = ("amx_tile", "amx_bf16", "amx_int8")
INSTRUCTIONS: Mapping[Product, str] = {
    "fp32": "avx512f",
    "bf16": "avx512_bf16",
    "int8": "avx512_vnni",
}


class RegisterLoops:
    """The loops of cpu_limits.cpp on `threads` threads at a time."""

    def __init__(self, threads: int, folder: Path) -> None:
        library = folder / "limits.so"
        command = ["c++", "-O2", "-mavx512f", "-mavx512vnni", "-mavx512bf16", "-shared", "-fPIC"]
        tiles = [f"-m{name.replace('_', '-')}" for name in TILES if self.has_tiles()]
        subprocess.run([*command, *tiles, str(SOURCE), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)

    @staticmethod
    def available() -> bool:
        return shutil.which("c++") is not None and detect_platform().cpu.has("avx512f")

    @staticmethod
    def has_tiles() -> bool:
        """Return whether the processor has tile registers and the system gives them to this
        process."""
        return native_unavailable("amx", detect_platform()) is None

    def product(self, kind: Product) -> Call:
        """`ROUNDS` rounds on every thread; two operations to a product."""
        return self._rounds(f"{kind}_rounds", f"{kind} in registers", PRODUCTS_PER_ROUND[kind])

    def tile_product(self, kind: Product) -> Call:
        """The same in tile registers."""
        products = PRODUCTS_PER_TILE_ROUND[kind]
        return self._rounds(f"{kind}_tile_rounds", f"{kind} in tile registers", products)

    def _rounds(self, function: str, title: str, products: int) -> Call:
        loop = getattr(self._library, function)
        loop.argtypes, loop.restype = (ctypes.c_int64,), None
        work = 2.0 * products * ROUNDS * self._threads
        return title, "GOP/s", work, self._everywhere(lambda _: loop(ROUNDS))

    def load(self, memory: torch.Tensor) -> Call:
        """All of `memory`, an equal part to each thread."""
        loop = self._library.load_lines
        loop.argtypes, loop.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
        part = memory.nbytes // self._threads // 256 * 256
        start = memory.data_ptr()
        run_all = self._everywhere(lambda place: loop(start + place * part, part))
        return "64-byte loads, huge pages", "GB/s", float(part * self._threads), run_all

    def _everywhere(self, work: Callable[[int], object]) -> Callable[[], object]:
        return lambda: list(self._pool.map(work, range(self._threads)))


def limit_figures(options: argparse.Namespace) -> Iterator[Figure]:
    threads = torch.get_num_threads()
    with TemporaryDirectory() as folder:
        loops = RegisterLoops(threads, Path(folder)) if RegisterLoops.available() else None
        probe = LimitProbe(threads)
        ordinary = torch.ones(READ_BYTES // 4)
        huge = map_huge_pages(READ_BYTES)[:READ_BYTES].view(torch.float32).fill_(1.0)
        reads: list[Call] = [
            ("torch sum, ordinary pages", "GB/s", float(READ_BYTES), ordinary.sum),
            ("torch sum, huge pages", "GB/s", float(READ_BYTES), huge.sum),
            ("torch dot, huge pages", "GB/s", float(READ_BYTES), lambda: torch.dot(huge, huge)),
        ]
        if loops is not None:
            reads.append(loops.load(huge))
        yield from figures_by_turns(reads, options.repeats)
        products: list[Call] = []
        for kind in PRODUCTS_PER_ROUND:
            work = 2.0 * MATMUL_SIZE**3
            products.append((f"{kind} by torch", "GOP/s", work, probe.call(kind)))
            if loops is not None and detect_platform().cpu.has(INSTRUCTIONS[kind]):
                products.append(loops.product(kind))
            if loops is not None and loops.has_tiles() and kind in PRODUCTS_PER_TILE_ROUND:
                products.append(loops.tile_product(kind))
        yield from figures_by_turns(products, options.repeats)


if __name__ == "__main__":
    run("cpu_limits", __doc__, limit_figures, has_quick=False)
