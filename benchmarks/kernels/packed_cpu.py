"""Matrices of few bits on the CPU: the speed of kinds of `linear_blocks`, and of tables.

    python -m benchmarks.kernels.packed_cpu [--threads N] [--repeats N] [--output FILE]

One matrix of Qwen3-0.6B, gate and up merged, with random codes and scales, beside the formats that
`quantization=` makes. Few rows: bytes of weights per second, beside the machine's limit ("memory
read"). Prefill: multiplications and additions. Every kind has several copies, which take turns, as
do kinds, so that weights come from memory and all meet the same machine.
"""

# ruff: isort: skip_file
# kernel_figures settles how threads wait before torch is imported
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

from benchmarks.kernels.kernel_figures import Call, Figure, figures_by_turns, run
import torch

from quire.config.packed.block_kinds import BLOCK_KINDS, BlockKind
from quire.config.packed.table_format import TableFormat
from quire.config.quantization import matrix_bytes
from quire.ops import OpSet, PackedMatrix, Team, build_op_set
from quire.ops.linear.blocks.cases import block_weight
from quire.ops.linear.tables.cases import table_weight
from quire.base.platform import detect_platform
from quire.compute.quantization import Int4Format, Int8Format

OUTPUTS, INPUTS = 6144, 1024
ROWS = (1, 4, 16)
PREFILL_ROWS = 512
COPIES_BYTES = 40 * 2**20
"""Bytes of all copies of a kind: with those of other kinds, more than the last-level cache."""

TABLES = {
    "plain bf16": None,
    "fp8": TableFormat(8, INPUTS),
    "fp8, blocks": TableFormat(8, 128),
    "nf4": TableFormat(4, 64),
    "squeezellm, 3 bits": TableFormat(3, INPUTS, own_tables=True),
}
"""Formats of `linear_tables`, and what they widen to."""

Product = Callable[[torch.Tensor], torch.Tensor]


def block_size(kind: BlockKind) -> int:
    """Return the block size of GGUF's types, or the usual one of GPTQ and AWQ."""
    if kind.factors:
        return 256
    return 128 if kind.offset == "zero" else kind.group_size


def products(ops: OpSet) -> dict[str, tuple[int, Product]]:
    """Bytes of a matrix, and the product with the next copy at every call, by name."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator).bfloat16()
    found: dict[str, tuple[int, Product]] = {}

    def add(name: str, size: int, make: Callable[[], PackedMatrix]) -> None:
        copies = cycle([make() for _ in range(-(-COPIES_BYTES // size))])
        found[name] = size, lambda x: next(copies)(x)

    for name, each in (("int8", Int8Format(ops)), ("int4", Int4Format(ops))):
        size = matrix_bytes(name, OUTPUTS, INPUTS, 2)
        add(name, size, lambda each=each: each.pack(weight, None))
    for kind in BLOCK_KINDS.values():
        inputs = block_size(kind)
        blocks = block_weight(generator, kind, OUTPUTS, INPUTS // inputs, inputs // kind.group_size)
        size = kind.matrix_bytes(OUTPUTS, INPUTS, inputs)
        add(kind.name, size, lambda blocks=blocks: ops.linear_blocks(blocks))
    for name, form in TABLES.items():
        if form is None:
            add(name, weight.nbytes, lambda: ops.linear(weight))
            continue
        blocks, own = INPUTS // form.size, form.own_tables
        tables = table_weight(generator, form.bits, OUTPUTS, blocks, form.size, own=own)
        size = form.matrix_bytes(OUTPUTS, INPUTS)
        make = partial(ops.linear_tables, tables._replace(added=None), dtype=weight.dtype)
        add(name, size, make)
    return found


def packed_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Few rows of every kind, then prefill."""
    team = Team(options.threads or torch.get_num_threads())
    made = products(build_op_set(detect_platform(), {}, team))
    for rows in ROWS:
        x = torch.randn(rows, INPUTS).bfloat16()
        calls: list[Call] = [
            (f"{rows} rows, {name}", "GB/s", float(size), lambda f=f, x=x: f(x))
            for name, (size, f) in made.items()
        ]
        yield from figures_by_turns(calls, options.repeats)
    x = torch.randn(PREFILL_ROWS, INPUTS).bfloat16()
    work = 2.0 * PREFILL_ROWS * OUTPUTS * INPUTS
    prefill: list[Call] = [
        (f"{PREFILL_ROWS} rows, {name}", "GFLOP/s", work, lambda f=f: f(x))
        for name, (_, f) in made.items()
    ]
    yield from figures_by_turns(prefill, options.repeats)


if __name__ == "__main__":
    run("packed_cpu", __doc__, packed_figures, has_quick=False)
