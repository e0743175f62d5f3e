"""An engine of random weights in this process, for what compares quire with itself."""

# ruff: isort: skip_file
# quire_engine settles how threads wait before torch is imported
from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks.peers.engines.quire_engine  # noqa: F401
from benchmarks.arguments import command_line
import numpy as np

from quire.entrypoints.bench.record import new_record, spread_of
from quire.entrypoints.bench.throughput import exact_params
from quire.entrypoints.llm import LLM
from quire.protocol.request import EngineRequest

__all__ = ["LocalEngine", "add_local_arguments", "save_local_record"]


class LocalEngine:
    """Computes what it is given, a step at a time."""

    def __init__(self, options: argparse.Namespace, **settings: Any) -> None:
        """options: parsed arguments of `add_local_arguments`."""
        self._llm = LLM(
            model=str(options.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            quiet=True,
            num_threads=options.threads,
            quantization=options.quantization,
            enable_prefix_caching=False,
            seed=options.seed,
            **settings,
        )
        self.client = self._llm.engine.client
        self.resolved = self._llm.engine.resolved
        self._next_handle = 0

    def add(self, prompts: Sequence[Sequence[int]], output_len: int) -> None:
        params = exact_params(output_len)
        for prompt in prompts:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            ids = np.array(prompt, np.int32)
            self.client.add(EngineRequest(str(handle), handle, ids, params, handle, frozenset()))

    def finish(self) -> None:
        """Step until nothing is left to compute."""
        while self.client.has_unfinished:
            self.client.step()

    def end(self) -> None:
        """End what runs."""
        self.client.abort(range(self._next_handle))
        self.finish()


def add_local_arguments(parser: argparse.ArgumentParser, *, turns_help: str) -> None:
    models = Path(__file__).parents[1] / "models"
    parser.add_argument("--model", type=Path, default=models / "qwen3-0.6b")
    parser.add_argument("--quantization", help="of the weights (none: as the model's dtype)")
    parser.add_argument("--turns", type=int, default=7, help=turns_help)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")


def save_local_record(
    benchmark: str,
    options: argparse.Namespace,
    engine: LocalEngine,
    workload: Mapping[str, Any],
    figures: Mapping[str, Sequence[float]],
) -> None:
    """Write what was measured where `options` ask for it. workload: values beside
    model and turns."""
    if options.output is None:
        return
    record = new_record(
        benchmark,
        command_line(),
        engine.resolved,
        None,
        seed=options.seed,
        workload={"model": options.model.name, "turns": options.turns, **workload},
        figures={name: spread_of(values) for name, values in figures.items()},
    )
    record.save(options.output)
