"""Cost of structured output: decode steps of rows with a grammar, beside steps of as many without.

    python -m benchmarks.decoding.structured [--model benchmarks/models/qwen3-0.6b]
        [--quantization int8]
        [--output benchmarks/results/structured.json]

One engine with random weights and a made-up tokenizer as wide as the model's logits. All sequences
of a turn have the same JSON Schema, of an array that never ends, or none; the turns alternate. A
figure is the wall time of one step, planning and drawing included, with two steps in flight.
*masked* steps take no forced tokens, so that they compute as many tokens as plain ones:
*added_percent* is what masks cost. *grammar* steps compute tokens to which the schema leaves no
alternative beside the others, so their tokens per row and step and their time per token are given.
*mask_us* is the time to make one row's mask, alone, at each place of such an output.
"""

# ruff: noqa: SLF001  a setting that only measurements change

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import benchmarks.peers.engines.quire_engine  # noqa: F401  settles how threads wait before torch is imported
import numpy as np
from benchmarks.arguments import command_line
from benchmarks.peers.engines.random_checkpoint import read_config

from quire.entrypoints.bench.record import new_record, percentile, spread_of
from quire.entrypoints.llm import LLM
from quire.plan.grammar.guidance import GuidanceGrammars
from quire.plan.grammar.vocabulary import Vocabulary, spelled_by_bytes
from quire.protocol.grammar import StructuredOutputsParams
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

ROWS = (1, 16, 64)
PROMPT_LEN, WARMUP_STEPS = 8, 6
MAX_LEN = 512
SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "count": {"type": "integer"},
            "kind": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "count", "kind", "tags"],
    },
}


def main() -> int:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(options.model, Path(folder) / "model", options.seed)
        engine = Decoder(model, options)
        figures: dict[str, list[float]] = {"mask_us": engine.mask_times()}
        for rows in options.rows:
            for name, values in engine.step_times(rows, options.turns, options.steps).items():
                figures[f"{rows}_rows_{name}"] = values
    for name, values in figures.items():
        print(f"{name:28} {statistics.median(values):9.3f}  p99 {percentile(values, 99):9.3f}")
    if options.output is not None:
        record = new_record(
            "structured",
            command_line(),
            engine.llm.engine.resolved,
            None,
            seed=options.seed,
            workload={"model": options.model.name, "turns": options.turns, "schema": SCHEMA},
            figures={name: spread_of(values) for name, values in figures.items()},
        )
        record.save(options.output)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = Path(__file__).parents[1] / "models"
    parser.add_argument("--model", type=Path, default=models / "qwen3-0.6b")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--turns", type=int, default=6, help="of rows with and without a grammar")
    parser.add_argument("--steps", type=int, default=16, help="per turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def with_tokenizer(model: Path, folder: Path, seed: int) -> Path:
    """The folder of a model's shape, and a byte-level tokenizer with as many tokens as it has
    logits: all bytes, and words of random letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    shutil.copytree(model, folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng = np.random.default_rng(seed)
    words = dict.fromkeys(["<|end|>", *letters])
    size = int(read_config(model)["vocab_size"])
    plain = 'abcdefghijklmnopqrstuvwxyz0123456789Ġ"{}[],:.'
    while len(words) < size:
        length = int(rng.integers(2, 9))
        words["".join(rng.choice(list(plain), length))] = None
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Decoder:
    """An engine that does nothing but decode."""

    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        most = max(options.rows)
        self.llm = LLM(
            str(model), load_format="dummy", quiet=True, num_threads=options.threads,
            quantization=options.quantization, enable_prefix_caching=False, seed=options.seed,
            max_num_seqs=most, max_num_batched_tokens=max(PROMPT_LEN * most, 512),
            max_model_len=MAX_LEN, num_kv_blocks=most * (MAX_LEN // 16),
        )  # fmt: skip
        self._client = self.llm.engine.client
        self._drafts = self._client._core._scheduler._drafts  # type: ignore[attr-defined]
        self._vocab_size = self.llm.engine.spec.vocab_size
        self._rng = np.random.default_rng(options.seed)
        self._next_handle = 0
        self._spec = StructuredOutputsParams(json=SCHEMA).spec

    @contextmanager
    def running(self, rows: int, *, has_grammar: bool) -> Iterator[None]:
        """So many sequences decode within."""
        first = self._next_handle
        params = SamplingParams(temperature=1, max_tokens=MAX_LEN - PROMPT_LEN, ignore_eos=True)
        for handle in range(first, first + rows):
            ids = self._rng.integers(1, self._vocab_size, PROMPT_LEN).astype(np.int32)
            request = EngineRequest(
                str(handle), handle, ids, params, handle, frozenset({0}),
                grammar=self._spec if has_grammar else None,
            )  # fmt: skip
            self._client.add(request)
        self._next_handle += rows
        seen: set[int] = set()
        while len(seen) < rows:
            seen |= set(self._client.step().handles.tolist())
        for _ in range(WARMUP_STEPS):
            self._client.step()
        yield
        self._client.abort(range(first, first + rows))
        while self._client.has_unfinished:
            self._client.step()

    def step_times(self, rows: int, turns: int, steps: int) -> dict[str, list[float]]:
        """Milliseconds of a step by turns, and what follows from them."""
        found: dict[str, list[float]] = {}

        def note(name: str, value: float) -> None:
            found.setdefault(name, []).append(value)

        for _ in range(turns):
            plain, _ = self._turn(rows, steps, has_grammar=False, takes_forced=True)
            masked, _ = self._turn(rows, steps, has_grammar=True, takes_forced=False)
            whole, tokens = self._turn(rows, steps, has_grammar=True, takes_forced=True)
            note("plain_ms", plain)
            note("masked_ms", masked)
            note("grammar_ms", whole)
            note("added_percent", 100 * (masked / plain - 1))
            note("grammar_tokens_per_step", tokens)
            note("grammar_added_percent_per_token", 100 * (whole / tokens / plain - 1))
        return found

    def _turn(
        self, rows: int, steps: int, *, has_grammar: bool, takes_forced: bool
    ) -> tuple[float, float]:
        """Milliseconds of a step, and its tokens per row."""
        self._drafts.takes_forced = takes_forced
        with self.running(rows, has_grammar=has_grammar):
            started, tokens = time.perf_counter(), 0
            for _ in range(steps):
                tokens += len(self._client.step().token_ids)
            seconds = time.perf_counter() - started
        return 1000 * seconds / steps, tokens / steps / rows

    def mask_times(self, length: int = 400) -> list[float]:
        """Microseconds of one mask at each place of an output of random tokens."""
        tokenizer = self.llm.engine.renderer.tokenizer
        assert tokenizer is not None
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        tokens += [b""] * (self._vocab_size - len(tokens))
        vocabulary = Vocabulary(tokens, [0], 0)
        grammars = GuidanceGrammars(lambda: (vocabulary, spelled_by_bytes(vocabulary)), [0])
        request = EngineRequest(
            "mask", 0, np.array([1], np.int32), SamplingParams(), 0, frozenset({0}),
            grammar=self._spec,
        )  # fmt: skip
        matcher = grammars.open(request).result().matcher()
        output, none, found = np.zeros(0, np.int32), np.zeros(0, np.int32), list[float]()
        for _ in range(length):
            started = time.perf_counter()
            (mask,) = matcher.masks(output, none)
            found.append(1e6 * (time.perf_counter() - started))
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size]
            output = np.append(output, self._rng.choice(np.flatnonzero(bits))).astype(np.int32)
        grammars.close()
        return found[1:]


if __name__ == "__main__":
    sys.exit(main())
