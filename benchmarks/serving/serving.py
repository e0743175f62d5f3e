"""The whole server on this machine, at several numbers of streams.

    python -m benchmarks.serving.serving [--server vllm] [--output FILE] [-- --num-threads 1]

`quire serve` has random weights of a small Llama (12.6 M, a vocabulary of 8,192 words). This
process streams requests of 64 tokens in and 64 out, on the same cores. Every token is a word of
text. `--server vllm` loads vLLM's server in the same way, if its command is on the PATH. Flags
behind `--` go to the server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from benchmarks.arguments import command_line
from tokenizers import Tokenizer, models, pre_tokenizers

from quire.base.errors import EngineError
from quire.entrypoints.bench.lengths import LengthRange
from quire.entrypoints.bench.serving import COMPLETIONS_PATH, ServingOptions, run_serving
from quire.entrypoints.bench.serving_load import Arrivals
from quire.entrypoints.bench.serving_table import figure_values
from quire.entrypoints.client import RemoteServer, ServerAddress

MODEL = Path(__file__).parents[1] / "models" / "llama-12m"
VOCAB_SIZE, SEED = 8192, 0
INPUT_LENGTH = OUTPUT_LENGTH = 64
REQUESTS_PER_STREAM = {1: 8, 16: 4, 64: 3}
LATENCIES, PERCENTILES = ("ttft", "tpot", "itl"), (99.0,)
COMMANDS = {
    "quire": (sys.executable, "-m", "quire", "serve"),
    "vllm": ("vllm", "serve"),
}
FLAGS = {
    "quire": ("--disable-access-log",),
    "vllm": ("--max-model-len", "2048", "--no-enable-prefix-caching"),
}
START_LIMIT_S = 900.0
SERVED_NAME = "llama-12m"


def write_model(folder: Path) -> None:
    """The config, and a tokenizer of as many words as the vocabulary has."""
    shutil.copy(MODEL / "config.json", folder)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


@contextlib.contextmanager
def served(
    name: str, flags: list[str], write: Callable[[Path], None] = write_model
) -> Iterator[RemoteServer]:
    """A server on a free port, while it is needed; what it says goes to stderr. write: writes the
    files of the model beside its weights, which are random."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        address = ("--host", "127.0.0.1", "--port", str(port))
        model = (folder, "--load-format", "dummy", "--served-model-name", SERVED_NAME)
        process = subprocess.Popen(
            [*COMMANDS[name], *model, *address, *FLAGS[name], *flags],
            stdout=sys.stderr, start_new_session=True,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url)
            yield RemoteServer(ServerAddress.parse(url))
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/v1/models", timeout=5.0).status_code == 200:
                return
        time.sleep(0.2)
    raise EngineError("the server ended, or took too long, before it was ready")


def load(num_streams: int, repeats: int) -> ServingOptions:
    """Return a load of as many concurrent requests as streams; each is followed by another when it
    ends."""
    return ServingOptions(
        path=COMPLETIONS_PATH,
        model=None,
        prompts=LengthRange(INPUT_LENGTH, INPUT_LENGTH),
        outputs=LengthRange(OUTPUT_LENGTH, OUTPUT_LENGTH),
        max_output_len=None,
        num_prompts=num_streams * REQUESTS_PER_STREAM[num_streams],
        arrivals=Arrivals(float("inf"), 1.0),
        max_concurrency=num_streams,
        vocab_size=VOCAB_SIZE,
        ignore_eos=True,
        temperature=0.0,
        extra_body={},
        goals_ms={},
        num_warmups=num_streams,
        repeats=repeats,
        timeout_s=60.0,
        seed=SEED,
        show_progress=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--server", choices=COMMANDS, default="quire")
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    options = parser.parse_args()
    load_before = os.getloadavg()
    values: dict[str, list[float]] = {}
    with served(options.server, options.flags) as server:
        for num_streams in REQUESTS_PER_STREAM:
            run = run_serving(load(num_streams, options.repeats), server)
            failed = [error for figures in run.figures for error in figures.errors]
            if failed:
                raise EngineError(f"{len(failed)} requests failed; the first: {failed[0]}")
            for name, found in figure_values(run.figures, LATENCIES, PERCENTILES).items():
                values[f"{num_streams} streams, {name}"] = found
    # Loads torch for the machine's facts, which must not happen while the server is measured.
    from quire.entrypoints.bench.machine import measure_limits
    from quire.entrypoints.bench.record import new_record, spread_of

    figures = {name: spread_of(found) for name, found in values.items()}
    for name, found in figures.items():
        print(f"{name:45s} {found.median:10.2f}  ({found.low:.2f} to {found.high:.2f})")
    if options.output is None:
        return
    record = new_record(
        "serving",
        command_line(),
        None,
        measure_limits(os.cpu_count() or 1),
        seed=SEED,
        workload={
            "model": "llama-12m, random weights",
            "server": options.server,
            "flags": [*FLAGS[options.server], *options.flags],
            "input_length": INPUT_LENGTH,
            "output_length": OUTPUT_LENGTH,
            "requests_per_stream": REQUESTS_PER_STREAM,
            "load_average": {"before": load_before, "after": os.getloadavg()},
        },
        figures=figures,
    )
    record.save(options.output)


if __name__ == "__main__":
    main()
