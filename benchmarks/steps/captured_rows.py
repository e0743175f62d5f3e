"""Decode steps that are captured and replayed, beside the same steps called from Python.

    python -m benchmarks.steps.captured_rows [--model benchmarks/models/qwen3-0.6b] [--output FILE]

Two engines with the same random weights, one of which captures; one step in flight, so that none
computes while the other is timed. For each number of rows both decode so many short sequences, by
turns of a few steps, after steps that do not count (the first of so many rows is captured). A
figure is the wall time of one step of all rows, planning and drawing included. Above
`MAX_CAPTURED_ROWS` rows both engines do the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from benchmarks.peers.engines.random_checkpoint import read_config
from benchmarks.steps.local_engine import LocalEngine, add_local_arguments, save_local_record

from quire.config.memory.plan import MAX_CAPTURED_ROWS
from quire.entrypoints.bench.lengths import random_prompts

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
PROMPT_LEN = 8
WARMUP_STEPS = 3
MODES = ("captured", "eager")


class Decoder(LocalEngine):
    """An engine that does nothing but decode the sequences that it was given last."""

    def __init__(self, options: argparse.Namespace, mode: str) -> None:
        self._output_len = 1 + WARMUP_STEPS + options.turns * options.steps
        super().__init__(
            options,
            max_num_seqs=max(options.rows),
            max_num_batched_tokens=PROMPT_LEN * max(options.rows),
            max_model_len=PROMPT_LEN + self._output_len + 1,
            depth=1,
            enforce_eager=mode == "eager",
            num_kv_blocks=max(options.rows) * (2 + (PROMPT_LEN + self._output_len) // 16),
        )

    def start(self, prompts: list[list[int]]) -> None:
        """End what runs, and bring sequences over these prompts to steps that decode them all."""
        self.end()
        self.add(prompts, self._output_len)
        self.client.step()  # all prompts
        self.decode(WARMUP_STEPS, len(prompts))

    def decode(self, num_steps: int, num_rows: int) -> list[float]:
        """Seconds of each step."""
        seconds: list[float] = []
        for _ in range(num_steps):
            started = time.perf_counter()
            output = self.client.step()
            seconds.append(time.perf_counter() - started)
            assert len(output.handles) == num_rows, "not every row was in the step"
        return seconds


def main() -> int:
    options = parse_arguments()
    vocab_size = read_config(options.model)["vocab_size"]
    decoders = {mode: Decoder(options, mode) for mode in MODES}
    figures: dict[str, list[float]] = {}
    for num_rows in options.rows:
        prompts = random_prompts([PROMPT_LEN] * num_rows, vocab_size, options.seed + num_rows)
        captured, eager = step_times(decoders, prompts, options.turns, options.steps)
        found = {
            "captured_ms": captured,
            "eager_ms": eager,
            "captured_over_eager": [a / b for a, b in zip(captured, eager, strict=True)],
        }
        figures |= {f"{num_rows}_rows_{name}": values for name, values in found.items()}
        medians = (f"{name} {statistics.median(values):.3f}" for name, values in found.items())
        print(f"{num_rows:4} rows:", *medians, flush=True)
    workload = {
        "prompt_len": PROMPT_LEN,
        "steps_per_turn": options.steps,
        "max_captured_rows": MAX_CAPTURED_ROWS,
    }
    save_local_record("captured_rows", options, decoders["captured"], workload, figures)
    return 0


def step_times(
    decoders: dict[str, Decoder], prompts: list[list[int]], num_turns: int, num_steps: int
) -> list[list[float]]:
    """Median milliseconds of a step in each turn: one list per mode."""
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for decoder in decoders.values():
        decoder.start(prompts)
    for turn in range(num_turns):
        for mode in MODES if turn % 2 else MODES[::-1]:
            steps = decoders[mode].decode(num_steps, len(prompts))
            times[mode].append(1000 * statistics.median(steps))
    for decoder in decoders.values():
        decoder.end()
    return list(times.values())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--steps", type=int, default=3, help="per turn")
    add_local_arguments(parser, turns_help="of each engine per number of rows")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
