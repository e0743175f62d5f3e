"""The machine of a measurement: what it is, and what plain torch reaches on it in the same run."""

from __future__ import annotations

import platform as host
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import quire
from quire.config.device import describe_gpu
from quire.config.memory_plan import format_bytes
from quire.platform import Platform, detect_platform

__all__ = [
    "Limits",
    "LowPrecisionLimits",
    "Machine",
    "current_commit",
    "describe_machine",
    "measure_limits",
    "measure_low_precision_limits",
]

READ_BYTES = 10**9
MATMUL_SIZE = 2048
REPEATS = 5

_SHOWN_FEATURES = (
    "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "sve", "bf16", "i8mm",
)  # fmt: skip
"""The features that decide how fast a model runs; a processor lists a hundred others."""


@dataclass(frozen=True, slots=True)
class Machine:
    """cache_bytes: by level. features: those that matter to kernels. threads: torch's. gpu: what it
    is, or "none"."""

    cpu: str
    num_cores: int
    features: tuple[str, ...]
    cache_bytes: dict[str, int]
    memory_bytes: int
    free_bytes: int
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
        return [
            f"quire        {self.quire}, Python {self.python}, torch {self.torch}",
            f"system       {self.system}",
            f"processor    {self.cpu}, {self.num_cores} cores, {self.threads} threads in torch",
            f"features     {' '.join(self.features) or 'unknown'}",
            f"caches       {caches or 'unknown'}",
            f"memory       {format_bytes(self.memory_bytes)}, {format_bytes(self.free_bytes)} free",
            f"GPU          {self.gpu}",
        ]


@dataclass(frozen=True, slots=True)
class Limits:
    """What plain torch reaches: summing READ_BYTES of float32, and a product of square float32
    matrices of MATMUL_SIZE (two operations per multiply and add). Best of REPEATS."""

    read_gb_per_s: float
    matmul_gflop_per_s: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class LowPrecisionLimits:
    """What plain torch reaches in the same product of bfloat16 matrices, and of uint8 by int8 ones
    with sums in int32, by oneDNN. Best of REPEATS."""

    bf16_gflop_per_s: float
    int8_gop_per_s: float


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


def measure_limits(
    num_threads: int, read_bytes: int = READ_BYTES, size: int = MATMUL_SIZE
) -> Limits:
    """Measure on this machine, in this process, on random numbers. torch's own number of threads
    is as before afterwards."""
    with _torch_threads(num_threads):
        numbers = torch.rand(read_bytes // 4)
        read = _best_seconds(numbers.sum)
        left, right = torch.rand(size, size), torch.rand(size, size)
        product = _best_seconds(lambda: left @ right)
    return Limits(
        read_gb_per_s=round(read_bytes / read / 1e9, 2),
        matmul_gflop_per_s=round(2 * size**3 / product / 1e9, 1),
        num_threads=num_threads,
    )


def measure_low_precision_limits(num_threads: int, size: int = MATMUL_SIZE) -> LowPrecisionLimits:
    """As `measure_limits`."""
    with _torch_threads(num_threads):
        left, right = torch.rand(2, size, size).bfloat16()
        bf16 = _best_seconds(lambda: left @ right)
        int8 = _best_seconds(_int8_product(size))
    return LowPrecisionLimits(
        bf16_gflop_per_s=round(2 * size**3 / bf16 / 1e9, 1),
        int8_gop_per_s=round(2 * size**3 / int8 / 1e9, 1),
    )


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


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def current_commit() -> str | None:
    """The commit of the source tree, with "+changes" if files differ; None outside a checkout."""
    folder = Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+changes" if _git(folder, "status", "--porcelain") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _best_seconds(work: Callable[[], object]) -> float:
    """The first call is not counted: it pays for page faults and thread starts."""
    work()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
