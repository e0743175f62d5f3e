"""Decoding with drafts of which a known share is right, beside decoding without.

    python -m benchmarks.decoding.speculation --quantization int8 [--streams 1 4 16] [--output FILE]

An engine with random weights gives outputs without drafts, drawn at temperature 1: greedy ones of
random weights repeat one token. Then the same requests predict these
outputs, of which a share of the tokens was changed at random (seeded), so that drafts are made
of them; outputs must be the same. Runs of all shares and one without predictions take turns. A
figure is tokens per second of a whole run, prompts included, and its ratio to the run without
drafts of the same turn. The first turn, in which times of steps are learnt, counts as well.

`accepted_at` is the share of drafts at each place among those of a row and step that were right.
`predicted` is what the cost model expects of the best number of drafts: tokens per step at that
share, over the times of steps that it has measured. The memory limit is that of steps which give
each stream one token: the times that memory can be read as fast as a turn finds it, over the
weights.
"""

# ruff: noqa: SLF001  what the cost model has learnt is nobody's business but its own
from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.peers.engines.random_checkpoint import count_weights, read_config
from benchmarks.steps.local_engine import LocalEngine, add_local_arguments, save_local_record

from quire.base.telemetry.engine_stats import SchedulerStats
from quire.entrypoints.bench.lengths import random_prompts
from quire.entrypoints.bench.machine import LimitProbe
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

PROMPT_LEN = 16
OFF = None
BITS = {None: 16, "int8": 8}
"""Bits of a weight, for each quantization whose memory limit is known."""
Tokens = npt.NDArray[np.int32]


class Decoder(LocalEngine):
    """Runs a batch of requests from start to end, with what each predicts of its output."""

    def __init__(self, options: argparse.Namespace) -> None:
        length = PROMPT_LEN + options.output_len + 1
        super().__init__(
            options,
            max_num_seqs=max(options.streams),
            max_num_batched_tokens=max(PROMPT_LEN * max(options.streams), 256),
            max_model_len=length,
            num_kv_blocks=max(options.streams) * (2 + length // 16) + 64,
        )
        self._output_len = options.output_len

    def run(
        self, prompts: list[list[int]], predictions: list[Tokens] | None
    ) -> tuple[float, list[Tokens]]:
        """Seconds, and the outputs."""
        params = SamplingParams(
            temperature=1.0, max_tokens=self._output_len, ignore_eos=True, detokenize=False
        )
        outputs: dict[int, list[int]] = {}
        started = time.perf_counter()
        for i, prompt in enumerate(prompts):
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            outputs[handle] = []
            said = np.zeros(0, np.int32) if predictions is None else predictions[i]
            self.client.add(
                EngineRequest(
                    str(handle),
                    handle,
                    np.array(prompt, np.int32),
                    params,
                    seed=i,
                    prediction_token_ids=said,
                )
            )
        while self.client.has_unfinished:
            step = self.client.step()
            for handle, token in zip(step.handles.tolist(), step.token_ids.tolist(), strict=True):
                outputs[handle].append(token)
        seconds = time.perf_counter() - started
        return seconds, [np.array(tokens, np.int32) for tokens in outputs.values()]

    def predicted(self, num_streams: int, right: float) -> float:
        """Gain that the cost model expects at the best number of drafts per row."""
        client: Any = self.client
        times = client._core._scheduler._drafts._times
        plain = times.expected(num_streams, False)
        gains = [1.0]
        for count in range(1, 17):
            tokens = sum(right**place for place in range(count + 1))
            gains.append(tokens * plain / times.expected(num_streams * (count + 1), True))
        return max(gains)


def changed(outputs: list[Tokens], share: float, vocab_size: int, seed: int) -> list[Tokens]:
    """The outputs, of which a share of the tokens is another one."""
    rng = np.random.default_rng(seed)
    found: list[Tokens] = []
    for tokens in outputs:
        is_wrong = rng.random(len(tokens)) < share
        other = (tokens + rng.integers(1, vocab_size, len(tokens))) % vocab_size
        found.append(np.where(is_wrong, other, tokens).astype(np.int32))
    return found


def main() -> int:
    options = parse_arguments()
    vocab_size = read_config(options.model)["vocab_size"]
    decoder = Decoder(options)
    figures: dict[str, list[float]] = {}
    accepted: dict[str, Any] = {}
    probe = LimitProbe(options.threads)
    for num_streams in options.streams:
        prompts = random_prompts([PROMPT_LEN] * num_streams, vocab_size, options.seed + num_streams)
        decoder.run(prompts, None)
        _, outputs = decoder.run(prompts, None)
        modes: list[float | None] = [OFF, *options.changed]
        for turn in range(options.turns):
            off = 0.0
            if (bits := BITS.get(options.quantization)) is not None:
                num_bytes = sum(count_weights(read_config(options.model))) * bits / 8
                limit = num_streams * probe.read(choose=statistics.median) * 1e9 / num_bytes
                name = f"{num_streams}_streams_memory_limit_tokens_per_s"
                figures.setdefault(name, []).append(limit)
            for share in modes:
                said = None if share is OFF else changed(outputs, share, vocab_size, turn)
                before = decoder.client.stats()
                seconds, found = decoder.run(prompts, said)
                same = all(map(np.array_equal, found, outputs))
                assert same, f"drafts changed an output ({num_streams} streams, {share})"
                rate = num_streams * options.output_len / seconds
                off = rate if share is OFF else off
                name = "off" if share is OFF else f"{share:.0%}_changed"
                key = f"{num_streams}_streams_{name}"
                figures.setdefault(f"{key}_tokens_per_s", []).append(rate)
                if share is not OFF:
                    figures.setdefault(f"{key}_over_off", []).append(rate / off)
                    accepted[key] = _since(before, decoder.client.stats())
                    accepted[key]["predicted"] = round(decoder.predicted(num_streams, 1 - share), 3)
        for key, values in figures.items():
            if key.startswith(f"{num_streams}_streams") and key.endswith("over_off"):
                print(f"{key}: {statistics.median(values):.3f}", accepted[key[:-9]], flush=True)
    workload = {
        "prompt_len": PROMPT_LEN,
        "output_len": options.output_len,
        "drafts": accepted,
    }
    save_local_record("speculation", options, decoder, workload, figures)
    return 0


def _since(before: SchedulerStats, after: SchedulerStats) -> dict[str, Any]:
    """Outcome of the drafts of one run: rows that had some in a step, and of these drafts."""
    rows = after.drafted_rows_total - before.drafted_rows_total
    places = after.accepted_drafts_at
    known = (*before.accepted_drafts_at, *[0] * len(places))
    right = [new - old for new, old in zip(places, known, strict=False)]
    return {
        "rows": rows,
        "drafts": after.draft_tokens_total - before.draft_tokens_total,
        "accepted": after.accepted_drafts_total - before.accepted_drafts_total,
        "accepted_at": [round(count / rows, 3) for count in right if count] if rows else [],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 4, 16))
    parser.add_argument("--changed", type=float, nargs="+", default=(0.0, 0.2, 0.4, 1.0))
    parser.add_argument("--output-len", type=int, default=128)
    add_local_arguments(parser, turns_help="of each share per number of streams")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
