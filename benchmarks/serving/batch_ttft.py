"""Time to the first token of interactive requests beside a batch, by turns with the same requests
alone.

    python -m benchmarks.serving.batch_ttft [--turns 5] [--seconds 15]
        [--output benchmarks/results/batch_ttft.json]

`quire serve` with the small Llama of `serving.py`. One client streams one request after the other,
64 random tokens in and 16 out, with pauses of random length. In every other turn a batch of the
server's own (`/v1/batches`) has more lines than it can answer meanwhile; it is cancelled at the end
of the turn. *ratio* is that of the two medians of a pair of turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from benchmarks.arguments import command_line, positive_number
from benchmarks.serving.serving import VOCAB_SIZE, served

from quire.entrypoints.bench.record import new_record, percentile, spread_of

MODEL, ROUTE = "llama-12m", "/v1/completions"
PROMPT_LEN, OUTPUT_LEN, BATCH_OUTPUT_LEN = 64, 16, 64
LEAST_PAUSE_S, MOST_PAUSE_S = 0.01, 0.2
LIMIT_S = 60.0
ENDED = ("completed", "failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class Client:
    """http: connection to the server. choose: source of prompts and pauses."""

    http: httpx.Client
    choose: random.Random

    def prompt(self) -> list[int]:
        return [self.choose.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)]

    def body(self, output_len: int) -> dict[str, Any]:
        asked = {"model": MODEL, "prompt": self.prompt(), "max_tokens": output_len}
        return {**asked, "ignore_eos": True, "temperature": 0}

    def first_token_s(self) -> float:
        """Seconds until the first event of one request, which is read to its end."""
        body = {**self.body(OUTPUT_LEN), "stream": True}
        started, first = time.perf_counter(), 0.0
        with self.http.stream("POST", ROUTE, json=body) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: ") and not first:
                    first = time.perf_counter() - started
        return first

    def turn(self, seconds: float) -> list[float]:
        """Milliseconds to the first token, request after request."""
        found: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found.append(1000 * self.first_token_s())
            time.sleep(self.choose.uniform(LEAST_PAUSE_S, MOST_PAUSE_S))
        return found

    def start_batch(self, num_lines: int) -> str:
        """The id of a batch that computes."""
        lines = [
            json.dumps({"custom_id": f"{i}", "url": ROUTE, "body": self.body(BATCH_OUTPUT_LEN)})
            for i in range(num_lines)
        ]
        file = {"file": ("in.jsonl", "\n".join(lines))}
        kept = self.http.post("/v1/files", files=file, data={"purpose": "batch"}).json()["id"]
        batch = self.http.post(
            "/v1/batches", json={"input_file_id": kept, "endpoint": ROUTE}
        ).json()["id"]
        self._until(lambda: self.batch(batch)["request_counts"]["completed"] > 0, "an answer")
        return batch

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.http.get(f"/v1/batches/{batch_id}").json()

    def end_batch(self, batch_id: str) -> int:
        """End a batch and return its answered lines; SystemExit if there was nothing left to do."""
        self.http.post(f"/v1/batches/{batch_id}/cancel")
        self._until(lambda: self.batch(batch_id)["status"] in ENDED, "the end of a batch")
        found = self.batch(batch_id)
        if found["status"] != "cancelled":
            raise SystemExit(f"the batch was {found['status']} too early: give more --lines")
        self._until(lambda: self.http.get("/load").json()["server_load"] == 0, "an idle server")
        return int(found["request_counts"]["completed"])

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not is_so():
            if time.monotonic() > end:
                raise SystemExit(f"{what} did not come within {LIMIT_S:g} s")
            time.sleep(0.05)


def main() -> int:
    options = parse_arguments()
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as folder:
        flags = ["--data-dir", folder, "--max-num-seqs", str(options.max_num_seqs)]
        with served("quire", flags) as server:
            http = httpx.Client(base_url=str(server.address), timeout=LIMIT_S)
            client = Client(http, random.Random(options.seed))
            client.turn(1.0)  # warms up
            for turn in range(options.turns):
                times: dict[str, list[float]] = {}
                for name in ("alone", "beside")[:: 1 if turn % 2 else -1]:
                    batch = client.start_batch(options.lines) if name == "beside" else None
                    times[name] = client.turn(options.seconds)
                    if batch is not None:
                        note("batch [lines]", client.end_batch(batch))
                for name, found in times.items():
                    note(f"ttft {name}, median [ms]", statistics.median(found))
                    note(f"ttft {name}, p99 [ms]", percentile(found, 99))
                    note(f"requests {name}", len(found))
                medians = [statistics.median(times[name]) for name in ("beside", "alone")]
                note("ratio", medians[0] / medians[1])
    spreads = {name: spread_of(values) for name, values in sorted(figures.items())}
    for name, spread in spreads.items():
        print(f"{name:26} {spread.median:9.3f}  [{spread.low:.3f}, {spread.high:.3f}]")
    if options.output is not None:
        workload = {
            "model": MODEL, "prompt_len": PROMPT_LEN, "output_len": OUTPUT_LEN,
            "batch_output_len": BATCH_OUTPUT_LEN, "turns": options.turns,
            "seconds": options.seconds, "max_num_seqs": options.max_num_seqs,
        }  # fmt: skip
        record = new_record(
            "batch_ttft", command_line(), None, None,
            seed=options.seed, workload=workload, figures=spreads,
        )  # fmt: skip
        record.save(options.output)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=positive_number, default=5, help="pairs of turns")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a turn")
    parser.add_argument("--lines", type=positive_number, default=5_000, help="of a batch")
    parser.add_argument("--max-num-seqs", type=positive_number, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
