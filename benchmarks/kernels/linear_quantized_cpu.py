"""8-bit and 4-bit linear layers on the CPU, beside torch's own kernels and the machine's limits.

    python -m benchmarks.kernels.linear_quantized_cpu [--quick] [--threads N] [--repeats N]
        [--output FILE]

Matrices of Qwen3-0.6B with a vocabulary of 32,768, random data, bfloat16 activations. Every matrix
exists in several copies, together larger than the caches, which take turns; our kernel and torch's
take turns too. One row counts the bytes of the packed weights, more rows count operations. Ours is
the best provider of this machine, or the one that `QUIRE_CPU_ISA` names, compared with the
reference before it is timed; torch's kernels (`_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu`)
keep 16-bit activations. The limit of arithmetic is a loop of vpdpbusd over registers
(cpu_limits.cpp), on as many threads; it is left out where there is no compiler or no such
instruction. Tile registers (AMX) go beyond it.
"""

# ruff: isort: skip_file
# kernel_figures settles how threads wait before torch is imported
# ruff: noqa: SLF001  torch names its kernels for quantized weights so
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.kernels.kernel_figures import Call, Figure, figures_by_turns, run
from benchmarks.kernels.cpu_limits import INSTRUCTIONS, RegisterLoops
import torch

from quire.config import env
from quire.ops import ALL_OPS, Team, check_provider, force_isa, select
from quire.ops.linear.int4.cases import int4_weight
from quire.ops.linear.int8.cases import int8_weight
from quire.base.platform import Platform, detect_platform

SHAPES = {
    "qkv": (1024, 4096),
    "gate_up": (1024, 6144),
    "down": (3072, 1024),
    "o": (2048, 1024),
    "head": (1024, 32768),
}
"""Name to inputs and outputs."""
ROWS = (1, 4, 8, 16, 32, 64, 256)
COPIES_BYTES = 160 * 2**20
"""Size of all copies of a matrix: several times the last-level cache."""
GROUP_SIZE = 32
DTYPE = torch.bfloat16

Layer = Callable[[torch.Tensor], torch.Tensor]
Maker = Callable[[int, int], Layer]
"""A layer with random weights, from inputs and outputs."""


def our_makers(platform: Platform, team: Team) -> dict[str, Maker]:
    """The best kernels that this machine has, if they equal their references."""
    isa = env.cpu_isa()
    layers: dict[str, Callable[..., Layer]] = {}
    for name in ("linear_int8", "linear_int4"):
        op = ALL_OPS[name]
        forced = force_isa(isa).get(name)
        chosen, layers[name] = select(op, platform, forced, team)
        provider = op.provider(chosen)
        if provider is not None and not (report := check_provider(op, provider)).ok:
            raise SystemExit("\n".join(report.failures))
    generator = torch.Generator().manual_seed(0)

    def int8(inputs: int, outputs: int) -> Layer:
        return layers["linear_int8"](*int8_weight(generator, outputs, inputs), dtype=DTYPE)

    def int4(inputs: int, outputs: int) -> Layer:
        weight, scale, zero = int4_weight(generator, outputs, inputs, GROUP_SIZE)
        return layers["linear_int4"](weight, scale, zero, dtype=DTYPE)

    ours = "quire" if isa is None else f"quire {isa}"
    return {f"int8 {ours}": int8, f"int4 {ours}": int4}


def torch_int8(inputs: int, outputs: int) -> Layer:
    """torch's 8-bit weights, one scale per output."""
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scale = torch.rand(outputs).to(DTYPE)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, weight, scale)


def torch_int4(inputs: int, outputs: int) -> Layer:
    """torch's 4-bit weights in groups, with 16-bit scales and zero points."""
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    scales = torch.rand(inputs // GROUP_SIZE, outputs, 2).to(DTYPE)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, GROUP_SIZE, scales)


def weight_bytes(name: str, inputs: int, outputs: int) -> float:
    """Return the bytes of a packed matrix; a zero point has 4 bits, with torch as many as the
    scale."""
    if name.startswith("int8"):
        return inputs * outputs
    return inputs * outputs * (0.5 + (4 if name.endswith("torch") else 2.5) / GROUP_SIZE)


def arithmetic_limit(platform: Platform, threads: int, repeats: int) -> Iterator[Figure]:
    """Operations of a register-only loop on `threads` threads at a time; two to a product."""
    if not RegisterLoops.available() or not platform.cpu.has(INSTRUCTIONS["int8"]):
        return
    with TemporaryDirectory() as folder:
        loop = RegisterLoops(threads, Path(folder)).product("int8")
        yield from figures_by_turns([loop], repeats)


def linear_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """The limit of arithmetic, then ours and torch's over the shapes."""
    platform, threads = detect_platform(), torch.get_num_threads()
    yield from arithmetic_limit(platform, threads, options.repeats)
    team = Team(threads)
    makers: dict[str, Maker] = our_makers(platform, team)
    makers |= {"int8 torch": torch_int8, "int4 torch": torch_int4}
    names = ("qkv", "down") if options.quick else tuple(SHAPES)
    rows = (1, 4, 16, 64) if options.quick else ROWS
    for shape in names:
        inputs, outputs = SHAPES[shape]
        made = {
            name: [maker(inputs, outputs) for _ in range(_copies(name, inputs, outputs))]
            for name, maker in makers.items()
        }
        for count in rows:
            x = torch.randn(count, inputs).to(DTYPE)
            calls = [_call(shape, name, layers, x, outputs) for name, layers in made.items()]
            yield from figures_by_turns(calls, options.repeats)


def _copies(name: str, inputs: int, outputs: int) -> int:
    return max(1, int(COPIES_BYTES / weight_bytes(name, inputs, outputs)))


def _call(shape: str, name: str, layers: list[Layer], x: torch.Tensor, outputs: int) -> Call:
    turns = cycle(layers)
    count, inputs = x.shape
    label = f"{shape} {count} rows {name}"
    if count == 1:
        return label, "GB/s", weight_bytes(name, inputs, outputs), lambda: next(turns)(x)
    return label, "GOP/s", 2.0 * count * inputs * outputs, lambda: next(turns)(x)


if __name__ == "__main__":
    run("linear_quantized_cpu", __doc__, linear_figures)
