"""Formats of quantized matrices on the CPU: the speed of their products, and of their making.

    python -m benchmarks.kernels.quantization_formats_cpu [--threads N] [--repeats N]
        [--output FILE]

One matrix of Qwen3-0.6B, gate and up merged, with random weights in bfloat16. Figures are weights
per second, so that formats of different sizes compare. Every format has several copies, together
larger than the caches, which take turns; formats take turns too, so that all meet the same machine.
"""

# ruff: isort: skip_file
# kernel_figures settles how threads wait before torch is imported
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

from benchmarks.kernels.kernel_figures import Call, Figure, figures_by_turns, run
import torch

from quire.ops import OpSet, PackedMatrix, Team, build_op_set
from quire.base.platform import detect_platform
from quire.compute.quantization import Int4Format, Int8Format, PlainFormat, WeightFormat

OUTPUTS, INPUTS = 6144, 1024
ROWS = (1, 4, 16, 64)
COPIES_BYTES = 100 * 2**20
"""Size of all copies of the narrowest format, at half a byte per weight: several times the
last-level cache."""


def formats(ops: OpSet) -> dict[str, WeightFormat]:
    """Return the formats by name; 4 bits in every group size, symmetric and with zero points."""
    found: dict[str, WeightFormat] = {"plain": PlainFormat(ops), "int8": Int8Format(ops)}
    for size in (32, 64, 128):
        for zero_points in (False, True):
            kind = "zero points" if zero_points else "symmetric"
            found[f"int4, groups of {size}, {kind}"] = Int4Format(
                ops, size, zero_points=zero_points
            )
    return found


def in_turn(copies: Sequence[PackedMatrix]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with the next copy at every call."""
    turns = cycle(copies)
    return lambda x: next(turns)(x)


def format_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Products of a few rows, then quantizing and packing."""
    team = Team(options.threads or torch.get_num_threads())
    candidates = formats(build_op_set(detect_platform(), {}, team))
    weight = torch.randn(OUTPUTS, INPUTS).bfloat16()
    amount = float(weight.numel())
    copies = max(1, COPIES_BYTES * 2 // weight.numel())
    made = {
        name: in_turn([each.pack(weight, None) for _ in range(copies)])
        for name, each in candidates.items()
    }
    for rows in ROWS:
        x = torch.randn(rows, INPUTS).bfloat16()
        calls: list[Call] = [
            (f"{rows} rows, {name}", "Gweights/s", amount, lambda f=f, x=x: f(x))
            for name, f in made.items()
        ]
        yield from figures_by_turns(calls, options.repeats)
    packing: list[Call] = [
        (f"packed, {name}", "Gweights/s", amount, lambda f=f: f.pack(weight, None))
        for name, f in candidates.items()
    ]
    yield from figures_by_turns(packing, options.repeats)


if __name__ == "__main__":
    run("quantization_formats_cpu", __doc__, format_figures, has_quick=False)
