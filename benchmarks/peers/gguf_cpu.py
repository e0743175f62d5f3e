"""The same GGUF file in quire and in llama.cpp, by turns on the same threads.

    python -m benchmarks.peers.gguf_cpu MODEL.gguf [...] --llama-python /path/to/python
        [--output FILE]
    python -m benchmarks.peers.gguf_cpu --shapes benchmarks/models/lfm2-1.2b [...]
        --work-dir FOLDER [--types BF16 Q8_0]
    python -m benchmarks.peers.gguf_cpu MODEL.gguf [...] --quantization int8 int4

Per file: prompt tokens per second of one prompt, output tokens per second of 1, 4 and 16 streams
that decode together, seconds from the start of a process to its first token of a text, and the
most memory that the process of the engine held. A file of a shape has random weights and no
vocabulary, so no text is timed; it is written once and kept. Both engines are open at once, each in
a process of its own, and take turns run by run, in the reverse order in every second repeat.
llama.cpp is llama-cpp-python built with GGML_NATIVE=ON; its system line is in the record. With
`--quantization` the same file in formats of quire's own takes llama.cpp's place.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import command_line, positive_number
from benchmarks.peers.engines.engine import AS_STORED, EngineOptions
from benchmarks.peers.engines.process import EngineProcess
from benchmarks.peers.engines.random_gguf import KINDS, write_random_gguf

from quire.entrypoints.bench.record import Spread, new_record, spread_of

PROMPT, DECODE_PROMPT, OUTPUTS = 512, 32, 64
STREAMS = (1, 4, 16)
MAX_MODEL_LEN = 768
TEXT = "The capital of France is"
SPACING = 7919
"""Between the token ids of prompts, which so differ from each other."""

FIRST_TOKEN = {
    "quire": """
import sys
from quire import LLM, SamplingParams
file, threads, text = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with LLM(file, quiet=True, num_threads=threads, max_model_len=768) as llm:
    llm.generate([text], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    print("first token", flush=True)
""",
    "llama.cpp": """
import sys
from llama_cpp import Llama
file, threads, text = sys.argv[1], int(sys.argv[2]), sys.argv[3]
llm = Llama(file, n_ctx=768, n_threads=threads, n_threads_batch=threads, verbose=False)
llm(text, max_tokens=1, temperature=0)
print("first token", flush=True)
""",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine here: its adapter, the interpreter that has it, and that one's environment.
    quantization: format to load the file in, None for the file's own."""

    name: str
    module: str
    python: str
    environment: Mapping[str, str]
    quantization: str | None = None

    @property
    def title(self) -> str:
        return self.name if self.quantization is None else f"{self.name}, {self.quantization}"

    def open(self, file: Path, threads: int) -> EngineProcess:
        weights = self.quantization or AS_STORED
        options = EngineOptions(file, weights, threads, max(STREAMS), MAX_MODEL_LEN, file.parent, 0)
        return EngineProcess(self.title, self.module, options, self.python, self.environment)

    def seconds_to_first_token(self, file: Path, threads: int) -> float:
        command = [self.python, "-c", FIRST_TOKEN[self.name], str(file), str(threads), TEXT]
        started = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.environment
        ) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            seconds = time.perf_counter() - started
        if b"first token" not in line or child.returncode != 0:
            raise RuntimeError(f"{self.name} gave no token of {file.name}")
        return seconds


def runs(outputs: int) -> dict[str, tuple[list[list[int]], list[int]]]:
    """Prompts and output lengths by name. outputs: tokens of a stream that decodes."""
    found = {"prefill": ([_prompt(0, PROMPT)], [2])}
    for streams in STREAMS:
        prompts = [_prompt(stream, DECODE_PROMPT) for stream in range(streams)]
        found[f"decode, {streams} streams"] = (prompts, [outputs] * streams)
    return found


def _prompt(number: int, length: int) -> list[int]:
    return [100 + (SPACING * (number * length + place)) % 20_000 for place in range(length)]


def measure(
    file: Path, peers: Sequence[Peer], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Figures by label, and the settings of each engine."""
    found: dict[str, list[float]] = {}
    threads, repeats = options.threads, options.repeats
    with ExitStack() as stack:
        engines = {
            peer.title: stack.enter_context(closing(peer.open(file, threads))) for peer in peers
        }
        for name, (prompts, lengths) in runs(options.outputs).items():
            for engine in engines.values():
                engine.run(prompts, lengths)  # warm
            for repeat in range(repeats):
                for title in list(engines)[:: -1 if repeat % 2 else 1]:
                    line = engines[title].run(prompts, lengths).timeline
                    rate = line.prefill_rate() if name == "prefill" else line.decode_rate()
                    found.setdefault(f"{title}: {name}, tokens/s", []).append(rate)
        for title, engine in engines.items():
            found[f"{title}: peak memory, MiB"] = [engine.peak_bytes() / (1 << 20)]
        settings = {title: engine.settings for title, engine in engines.items()}
    timed = file in options.files and not options.quantization
    for repeat in range(repeats if timed else 0):
        for peer in peers[:: -1 if repeat % 2 else 1]:
            label = f"{peer.name}: start to first token, s"
            found.setdefault(label, []).append(peer.seconds_to_first_token(file, threads))
    return found, settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--shapes", nargs="+", type=Path, default=[], help="folders with a config.json"
    )
    parser.add_argument("--types", nargs="+", choices=KINDS, default=KINDS, help="of shapes' files")
    parser.add_argument("--work-dir", type=Path, help="keeps the files of shapes")
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--threads", type=positive_number, default=2)
    parser.add_argument("--repeats", type=positive_number, default=3)
    parser.add_argument("--outputs", type=positive_number, default=OUTPUTS, help="of a stream")
    parser.add_argument("--note", default="", help="kept in the record")
    parser.add_argument(
        "--llama-python",
        default=sys.executable,
        help="interpreter with llama-cpp-python; LLAMA_CPP_PATH: a folder that has it",
    )
    parser.add_argument("--quantization", nargs="+", default=[], help="formats of quire's own")
    options = parser.parse_args()
    if options.shapes and options.work_dir is None:
        parser.error("--shapes needs --work-dir, a folder for their files")
    if not options.files and not options.shapes:
        parser.error("name GGUF files, or --shapes")
    made = [
        write_random_gguf(shape, options.work_dir / f"{shape.name}-{kind}.gguf", kind, seed=0)
        for shape in options.shapes
        for kind in options.types
    ]
    extra = {"OMP_NUM_THREADS": str(options.threads)}
    ours = {**os.environ, **extra}
    theirs = {**ours, "PYTHONPATH": os.environ.get("LLAMA_CPP_PATH", "")}
    adapters = "benchmarks.peers.engines"
    peers = [
        Peer("quire", f"{adapters}.quire_engine", sys.executable, ours, quantization)
        for quantization in (None, *options.quantization)
    ]
    if not options.quantization:
        python = options.llama_python
        peers.append(Peer("llama.cpp", f"{adapters}.llama_cpp_engine", python, theirs))
    figures: dict[str, Spread] = {}
    engines: dict[str, Any] = {}
    for file in (*options.files, *made):
        found, engines[file.name] = measure(file, peers, options)
        for label, values in found.items():
            figures[f"{file.name}, {label}"] = spread_of(values)
            print(f"{file.name}, {label}: {spread_of(values).median:.4g}", flush=True)
    if options.output:
        workload = {"engines": engines, "prompt": PROMPT, "note": options.note}
        workload |= {"decode_prompt": DECODE_PROMPT, "outputs": options.outputs}
        workload["threads"] = options.threads
        new_record(
            "gguf_cpu", command_line(), None, None, seed=0, workload=workload, figures=figures
        ).save(options.output)


if __name__ == "__main__":
    main()
