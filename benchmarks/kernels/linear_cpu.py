"""Linear layers on the CPU: bandwidth at one row, arithmetic at more, beside torch and the limits.

    python -m benchmarks.kernels.linear_cpu [--quick] [--threads N] [--repeats N] [--output FILE]

Matrices of Qwen3-0.6B with a vocabulary of 32,768, random data. Every matrix exists in several
copies, together larger than the caches, which take turns; the providers and torch's `linear` take
turns too, at one row also with a sum over memory, so that all meet the same machine. Figures are
medians over the repeats, with the lowest and highest. Every provider is compared with the reference
before it is timed. Instruction sets that only widen other kernels are left out.
"""

# ruff: isort: skip_file
# kernel_figures settles how threads wait before torch is imported
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

from benchmarks.kernels.kernel_figures import Call, Figure, figures_by_turns, run
import torch

from quire.ops import ALL_OPS, Team, check_provider, select
from quire.ops.compile import ISAS
from quire.base.platform import detect_platform

LINEAR = ALL_OPS["linear"]
SHAPES = {
    "qkv": (1024, 4096),
    "gate_up": (1024, 6144),
    "down": (3072, 1024),
    "o": (2048, 1024),
    "head": (1024, 32768),
}
"""Name to inputs and outputs."""
ROWS = (1, 4, 8, 16, 32, 64, 256, 1024)
COPIES_BYTES = 160 * 2**20
"""Size of all copies of a matrix: several times the last-level cache."""

Layer = Callable[[torch.Tensor], torch.Tensor]


def layers(call: Callable[..., Layer], weights: Sequence[torch.Tensor]) -> Callable[..., object]:
    """x → x Wᵀ with the next copy of the weight at every call."""
    turns = cycle([call(weight) for weight in weights])
    return lambda x: next(turns)(x)


def contenders(team: Team) -> dict[str, Callable[..., Layer]]:
    """torch, and every provider of this machine with a kernel of its own that equals torch's."""
    platform = detect_platform()
    own = {f"cpu_{isa.name}" for isa in ISAS if isa.extends is None or "linear_bf16" in isa.units}
    found: dict[str, Callable[..., Layer]] = {"torch": LINEAR.reference}
    for provider in LINEAR.providers:
        if provider.name in own and provider.unavailable(platform) is None:
            report = check_provider(LINEAR, provider)
            if not report.ok:
                raise SystemExit("\n".join(report.failures))
            found[provider.name] = select(LINEAR, platform, provider.name, team)[1]
    return found


def linear_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """All contenders over the shapes, in GB/s of weights at one row and in GFLOP/s at more."""
    names = ("qkv", "down") if options.quick else tuple(SHAPES)
    rows = (1, 4, 16, 64, 256) if options.quick else ROWS
    packers = contenders(Team(torch.get_num_threads()))
    memory = torch.ones(COPIES_BYTES // 4)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in names:
            inputs, outputs = SHAPES[shape]
            size = inputs * outputs * dtype.itemsize
            copies = max(1, min(32, COPIES_BYTES // size))
            weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(copies)]
            made = {name: layers(packer, weights) for name, packer in packers.items()}
            for count in rows:
                x = torch.randn(count, inputs).to(dtype)
                unit, amount = (
                    ("GB/s", float(size))
                    if count == 1
                    else ("GFLOP/s", 2.0 * count * inputs * outputs)
                )
                title = f"{shape} {dtype} {count} rows"
                calls: list[Call] = [
                    (f"{title} {name}", unit, amount, lambda f=f, x=x: f(x))
                    for name, f in made.items()
                ]
                if count == 1:
                    calls.append((f"{title} memory read", unit, float(memory.nbytes), memory.sum))
                yield from figures_by_turns(calls, options.repeats)


if __name__ == "__main__":
    run("linear_cpu", __doc__, linear_figures)
