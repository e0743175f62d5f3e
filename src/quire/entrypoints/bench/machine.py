"""Facts of the machine of a measurement, and the limits that plain torch reaches beside it."""

from __future__ import annotations

import platform as host
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import quire
from quire.base.platform import Platform, detect_platform
from quire.config.device import describe_gpu
from quire.config.memory.amounts import format_bytes
from quire.ops.native.huge_pages import map_huge_pages
from quire.ops.native.team import torch_threads

__all__ = [
    "LimitProbe",
    "Limits",
    "Machine",
    "Product",
    "current_commit",
    "describe_machine",
    "measure_limits",
]

READ_BYTES = 10**9
MATMUL_SIZE = 2048
REPEATS = 5
Product = Literal["fp32", "bf16", "int8"]

_SHOWN_FEATURES = (
    "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "sve", "bf16", "i8mm",
)  # fmt: skip
"""The features that decide how fast a model runs; a processor lists a hundred others."""

_BUT_RESULTS = ("--", ":/", ":(top,exclude)benchmarks/results")
"""Paths, to git: one benchmark's results are no change to what the next one measures."""


@dataclass(frozen=True, slots=True)
class Machine:
    """cache_bytes: sizes by level. features: features that matter to kernels. threads: number of
    torch's threads. gpu: its description, or "none"."""

    cpu: str
    num_cores: int
    features: tuple[str, ...]
    cache_bytes: dict[str, int]
    memory_bytes: int
    free_bytes: int
    swap_bytes: int
    system: str
    python: str
    torch: str
    quire: str
    threads: int
    gpu: str

    def lines(self) -> list[str]:
        """For people."""
        caches = ", ".join(
            f"{level} {format_bytes(size)}" for level, size in self.cache_bytes.items()
        )
        memory = ", ".join(
            f"{format_bytes(size)}{word}"
            for size, word in (
                (self.memory_bytes, ""),
                (self.free_bytes, " free"),
                (self.swap_bytes, " swap"),
            )
        )
        return [
            f"quire        {self.quire}, Python {self.python}, torch {self.torch}",
            f"system       {self.system}",
            f"processor    {self.cpu}, {self.num_cores} cores, {self.threads} threads in torch",
            f"features     {' '.join(self.features) or 'unknown'}",
            f"caches       {caches or 'unknown'}",
            f"memory       {memory}",
            f"GPU          {self.gpu}",
        ]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of plain torch: a read of READ_BYTES, and a product of square float32 matrices of
    MATMUL_SIZE (`LimitProbe`)."""

    read_gb_per_s: float
    matmul_gflop_per_s: float
    num_threads: int


def describe_machine(platform: Platform | None = None) -> Machine:
    """The machine as it is now."""
    found = platform or detect_platform()
    return Machine(
        cpu=found.cpu.model_name,
        num_cores=found.cpu.num_cores,
        features=tuple(name for name in _SHOWN_FEATURES if found.cpu.has(name)),
        cache_bytes={f"L{level}": size for level, size in found.cpu.cache_bytes},
        memory_bytes=found.memory_bytes,
        free_bytes=found.free_bytes,
        swap_bytes=found.swap_bytes,
        system=host.platform(),
        python=sys.version.split()[0],
        torch=torch.__version__,
        quire=quire.__version__,
        threads=torch.get_num_threads(),
        gpu=_describe_gpu(found),
    )


def _describe_gpu(platform: Platform) -> str:
    if platform.gpu is None:
        return "none"
    text = describe_gpu(platform.gpu)
    total, free = platform.gpu.memory_bytes, platform.gpu.free_bytes
    memory = f"{format_bytes(total)}, {format_bytes(free)} free" if total else "the host's memory"
    return f"{text}; {memory}"


class LimitProbe:
    """Measures the limits of plain torch on this machine, repeatedly. The numbers stay in memory
    between two measurements, so that one takes a tenth of a second. Each restores torch's own
    number of threads.

    Reads are of `read_bytes` of float32 in huge pages, where weights lie too: their sum or their
    product with themselves, whichever is faster here. Products are of square matrices of `size`,
    the right one transposed as the weight of a linear layer is: float32, bfloat16, or uint8 by int8
    with sums in int32 (oneDNN). benchmarks/kernels/cpu_limits.py sets both beside what cores can do
    at most.
    """

    def __init__(
        self, num_threads: int, read_bytes: int = READ_BYTES, size: int = MATMUL_SIZE
    ) -> None:
        self.num_threads = num_threads
        self._read_bytes, self._size = read_bytes, size
        self._calls: dict[str, Callable[[], object]] = {}

    def read(self, choose: Callable[[list[float]], float] = min) -> float:
        """Return GB/s. choose: picks the time that counts from those of REPEATS reads."""
        return self._read_bytes / choose(self._seconds("read")) / 1e9

    def product(self, kind: Product) -> float:
        """Billions of operations per second, two per multiply and add, the best of REPEATS."""
        return 2 * self._size**3 / min(self._seconds(kind)) / 1e9

    def call(self, name: Literal["read"] | Product) -> Callable[[], object]:
        """Return the call to time; it uses as many threads as torch has."""
        if name not in self._calls:
            self._calls[name] = self._make(name)
        return self._calls[name]

    def _seconds(self, name: Literal["read"] | Product) -> list[float]:
        """Time each repeat. One extra run before them is not counted: it pays for page faults and
        the start of threads."""
        with torch_threads(self.num_threads):
            work = self.call(name)
            return [_seconds_of(work) for _ in range(REPEATS + 1)][1:]

    def _make(self, name: Literal["read"] | Product) -> Callable[[], object]:
        if name == "read":
            memory = map_huge_pages(self._read_bytes)[: self._read_bytes]
            numbers = memory.view(torch.float32).fill_(1.0)
            ways: list[Callable[[], object]] = [numbers.sum, lambda: torch.dot(numbers, numbers)]
            return min(ways, key=lambda way: min(_seconds_of(way) for _ in range(REPEATS)))
        if name == "int8":
            return _int8_product(self._size)
        left, right = torch.rand(2, self._size, self._size)
        if name == "bf16":
            left, right = left.bfloat16(), right.bfloat16()
        return lambda: left @ right.T


def measure_limits(
    num_threads: int, read_bytes: int = READ_BYTES, size: int = MATMUL_SIZE
) -> Limits:
    """Measure on this machine, in this process."""
    probe = LimitProbe(num_threads, read_bytes, size)
    return Limits(round(probe.read(), 2), round(probe.product("fp32"), 1), num_threads)


def _int8_product(size: int) -> Callable[[], object]:
    """The quantized linear layer of torch's own quantization, with a weight packed before."""
    onednn = torch.ops.onednn
    weight = torch.randint(-128, 128, (size, size), dtype=torch.int8)
    packed = onednn.qlinear_prepack(weight, None)
    x = torch.randint(0, 256, (size, size), dtype=torch.uint8)
    scales, zeros = torch.ones(size), torch.zeros(size, dtype=torch.int64)
    return lambda: onednn.qlinear_pointwise(
        x, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


def current_commit() -> str | None:
    """The commit of the source tree, with "+changes" if files besides results differ;
    None outside a checkout."""
    folder = Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+changes" if _git(folder, "status", "--porcelain", *_BUT_RESULTS) else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
