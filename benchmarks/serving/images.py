"""Images in the server: streams beside an image, a repeated image, and the encoder alone.

    python -m benchmarks.serving.images [--turns 3] [--seconds 8]
        [--size 3072 2560] [--output benchmarks/results/images.json]

The model has the shape of SmolVLM-256M, random weights in bfloat16, and two threads. An image of
3072 x 2560 pixels is 31 tiles, 1,984 tokens; one of 3072 x 512 is 7 tiles, for a short run.

- Streams: one client streams tokens. In the first part of a turn nothing else runs; then an image
  that is new comes. *gaps beside* are those while it is encoded, *gaps beside prefill* those from
  there to its first token. *gap ratio* is that of the 99th percentiles beside and alone.
- Repeats: a request with a new image, and then the same one twice, with nothing beside.
  *ttft ratio* is that of the repeat and the first.
- The encoder: tiles through quire's, one by one as the engine encodes them, and through the one of
  `transformers` with `sdpa`, all at once, by turns. *encoder ratio* is quire's time over the other.
"""

# ruff: isort: skip_file
# quire_engine settles how threads wait before torch is imported
from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import benchmarks.peers.engines.quire_engine  # noqa: F401
from benchmarks.arguments import command_line, positive_number
from benchmarks.serving.serving import SERVED_NAME, served

import httpx
import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from quire.entrypoints.bench.record import new_record, percentile, spread_of
from quire.config.hf import read_json
from quire.config.media.idefics3 import TEXTS, IdeficsSpec
from quire.config.model_spec import ModelSpec
from quire.config.settings import EngineSettings
from quire.config.startup import find_model
from quire.compute.layers import LayerFactory
from quire.compute.models import load_tower
from quire.compute.models.towers import ImageTower
from quire.ops import Team, build_op_set
from quire.base.platform import detect_platform

MODEL = Path(__file__).parents[1] / "models" / "smolvlm-256m"
SIZE = (3072, 2560)
MAX_LEN, STREAM_LEN, PROMPT_LEN = 16_384, 15_000, 64
NUM_REPEATS = 2
LIMIT_S = 240.0
POLL_S = 0.05
SETTLE_S = 1.0
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}"
)


def write_model(folder: Path) -> None:
    """Write the config, the processor, and a tokenizer with the texts around tiles."""
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(MODEL / name, folder)
    config = read_json(MODEL / "config.json")
    size = config.section("text_config")
    assert size is not None
    vocab_size, image_id = size.read(int, "vocab_size"), config.read(int, "image_token_id")
    tiles = [TEXTS["tile"].format(row, column) for row in range(1, 7) for column in range(1, 7)]
    special = [TEXTS["image"], TEXTS["edge"], TEXTS["whole"], *tiles]
    words = {special[i]: image_id + i for i in range(len(special))}
    taken = set(words.values())
    words |= {f"w{index}": index for index in range(vocab_size) if index not in taken}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def picture(size: tuple[int, int], seed: int) -> str:
    """A data URL of an image of smooth colours, another one for each seed."""
    width, height = size
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [np.sin((rows + 3 * columns) / (40 + 7 * c) + seed) * 127 + 128 for c in range(3)]
    image = Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


@dataclass(slots=True)
class Stream:
    """A stream of tokens that runs until it is ended. times: moments of its tokens."""

    http: httpx.Client
    times: list[float] = field(default_factory=list[float])
    error: BaseException | None = None
    is_over: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Return when tokens come evenly."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: len(self.times) > 8 or self.error is not None, "a token")
        time.sleep(SETTLE_S)

    def _run(self) -> None:
        body = {
            "model": SERVED_NAME, "prompt": list(range(1, 1 + PROMPT_LEN)), "stream": True,
            "max_tokens": STREAM_LEN, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        try:
            for _ in events(self.http, "/v1/completions", body):
                self.times.append(time.perf_counter())
                if self.is_over:
                    return
            raise SystemExit("the stream ended too early: give fewer --seconds")
        except BaseException as error:  # noqa: BLE001  raised in `end`
            self.error = error

    def end(self) -> None:
        """End the stream. Raises the error that ended it before, if any."""
        self.is_over = True
        assert self._thread is not None
        self._thread.join(LIMIT_S)
        if self.error is not None:
            raise self.error

    def gaps(self, start: float, end: float) -> list[float]:
        """Return the milliseconds between tokens that came in a span of time."""
        pairs = itertools.pairwise(list(self.times))
        return [1000 * (after - before) for before, after in pairs if start <= after <= end]


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events with content of a streamed request."""
    with http.stream("POST", path, json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{path}: {reply.status_code} {reply.read().decode()[:500]}")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                choice = event["choices"][0] if event.get("choices") else {}
                if choice.get("text") or choice.get("delta", {}).get("content"):
                    yield event


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come within {LIMIT_S:g} s")
        time.sleep(POLL_S)


def ask(http: httpx.Client, url: str) -> None:
    """Return at the first token of an answer about an image."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "w5 w6"}]
    body = {
        "model": SERVED_NAME, "messages": [{"role": "user", "content": parts}], "stream": True,
        "max_tokens": 1, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    for _ in events(http, "/v1/chat/completions", body):
        return
    raise SystemExit("the answer about an image has no token")


def num_encoded(http: httpx.Client) -> int:
    """Return how many images the engine has looked up. It says so four times a second."""
    for line in http.get("/metrics").text.splitlines():
        if line.startswith("vllm:mm_cache_queries_total"):
            return int(float(line.split()[-1]))
    raise SystemExit("/metrics does not count images")


def beside_streams(
    http: httpx.Client, url: str, seconds: float, note: Callable[[str, float], None]
) -> None:
    """One turn of a stream alone, and beside an image."""
    stream = Stream(http)
    stream.start()
    started = time.perf_counter()
    time.sleep(seconds)
    sent, before = time.perf_counter(), num_encoded(http)
    failed: list[BaseException] = []

    def ask_beside() -> None:
        try:
            ask(http, url)
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)

    asking = threading.Thread(target=ask_beside, daemon=True)
    asking.start()
    until(lambda: num_encoded(http) > before or not asking.is_alive(), "an encoded image")
    encoded = time.perf_counter()
    asking.join(LIMIT_S)
    first = time.perf_counter()
    stream.end()
    if failed:
        raise failed[0]
    if asking.is_alive():
        raise SystemExit(f"the image had no answer within {LIMIT_S:g} s")
    alone, beside = stream.gaps(started, sent), stream.gaps(sent, encoded)
    prefill = stream.gaps(encoded, first)
    if min(len(alone), len(beside)) < 20:
        raise SystemExit(f"only {len(alone)} and {len(beside)} gaps: give more --seconds")
    note("encoding beside a stream [s]", encoded - sent)
    for name, gaps in (("alone", alone), ("beside", beside), ("beside prefill", prefill)):
        if gaps:
            note(f"gaps {name}, median [ms]", statistics.median(gaps))
            note(f"gaps {name}, p99 [ms]", percentile(gaps, 99))
    note("gap ratio", percentile(beside, 99) / percentile(alone, 99))


def repeated(http: httpx.Client, url: str, note: Callable[[str, float], None]) -> None:
    """One turn of an image that is new, and of the same one."""
    seconds: list[float] = []
    for _ in range(1 + NUM_REPEATS):
        started = time.perf_counter()
        ask(http, url)
        seconds.append(time.perf_counter() - started)
    first, again = seconds[0], statistics.median(seconds[1:])
    note("ttft first [s]", first)
    note("ttft repeated [s]", again)
    note("ttft ratio", again / first)


def own_encoder(spec: ModelSpec, threads: int) -> ImageTower:
    """quire's encoder, with random weights."""
    ops = build_op_set(detect_platform(), {}, Team(threads))
    factory = LayerFactory(ops, {}, torch.bfloat16, torch.device("cpu"), max_positions=0)
    tower = load_tower(spec, MODEL, factory, "dummy")
    assert tower is not None, "the model takes images"
    return tower


def other_encoder() -> Callable[[torch.Tensor], torch.Tensor]:
    """The encoder of `transformers`, and its projection, with random weights."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(MODEL)
    model: Any = AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    tower, connector = model.eval().vision_model, model.connector

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        return connector(tower(pixel_values=pixels).last_hidden_state)

    return encode


def model_spec() -> tuple[ModelSpec, IdeficsSpec]:
    """The shape of the model, and of its images."""
    spec = find_model(EngineSettings(model=str(MODEL), dtype="bfloat16")).spec
    assert isinstance(spec.images, IdeficsSpec)
    return spec, spec.images


def num_tokens(size: tuple[int, int]) -> int:
    """Return the number of tokens of an image."""
    images = model_spec()[1]
    return images.num_tiles(*size) * images.tokens_per_tile


def encoders(turns: int, num_tiles: int, threads: int, note: Callable[[str, float], None]) -> None:
    spec, images = model_spec()
    own, other = own_encoder(spec, threads), other_encoder()
    side = images.tower.tile_size
    tiles = torch.randint(0, 256, (num_tiles, side, side, 3), dtype=torch.uint8)
    pixels = ((tiles.float() / 255 - 0.5) / 0.5).permute(0, 3, 1, 2).contiguous().bfloat16()

    def by_quire() -> None:
        torch.set_num_threads(threads)  # as `ImageEncoder` has it
        for tile in tiles.split(1):
            own.encode(tile, torch.bfloat16)

    def by_transformers() -> None:
        torch.set_num_threads(threads)
        other(pixels)

    with torch.inference_mode():
        for turn in range(1 + turns):
            seconds: dict[str, float] = {}
            ways = {"quire": by_quire, "transformers": by_transformers}
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                started = time.perf_counter()
                ways[name]()
                seconds[name] = time.perf_counter() - started
            if turn:  # the first one warms up
                for name, found in seconds.items():
                    note(f"encoder of {name} [ms a tile]", 1000 * found / num_tiles)
                note("encoder ratio", seconds["quire"] / seconds["transformers"])


def main() -> int:
    options = parse_arguments()
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)
        print(f"{name}: {value:.3f}", file=sys.stderr, flush=True)

    threads = options.threads
    flags = [
        "--num-threads", str(threads), "--dtype", "bfloat16", "--max-model-len", str(MAX_LEN),
        "--image-cache", "256MiB",
    ]  # fmt: skip
    size: tuple[int, int] = tuple(options.size)
    if options.only in (None, "encoder"):
        encoders(options.encoder_turns, options.tiles, threads, note)
    if options.only in (None, "server", "streams"):
        with served("quire", flags, write_model) as server:
            http = httpx.Client(base_url=str(server.address), timeout=LIMIT_S)
            ask(http, picture(size, -1))  # warms up
            for turn in range(options.turns):
                beside_streams(http, picture(size, turn), options.seconds, note)
            for turn in range(0 if options.only == "streams" else options.repeat_turns):
                repeated(http, picture(size, 1000 + turn), note)
    spreads = {name: spread_of(values) for name, values in sorted(figures.items())}
    for name, spread in spreads.items():
        print(f"{name:40} {spread.median:9.3f}  [{spread.low:.3f}, {spread.high:.3f}]")
    if options.output is not None:
        workload = {
            "model": MODEL.name, "image": size, "image_tokens": num_tokens(size),
            "threads": threads, "turns": options.turns, "seconds": options.seconds,
            "repeat_turns": options.repeat_turns, "encoder_turns": options.encoder_turns,
            "tiles": options.tiles,
        }  # fmt: skip
        record = new_record(
            "images", command_line(), None, None, seed=0, workload=workload, figures=spreads
        )
        record.save(options.output)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=positive_number, default=3, help="of a stream and an image")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a stream alone")
    parser.add_argument("--repeat-turns", type=positive_number, default=2)
    parser.add_argument("--encoder-turns", type=positive_number, default=7)
    parser.add_argument(
        "--size", type=positive_number, nargs=2, default=SIZE, metavar=("WIDTH", "HEIGHT"),
        help="of images, in pixels; 3072 512 makes 7 tiles",
    )  # fmt: skip
    parser.add_argument("--tiles", type=positive_number, default=4, help="in a turn of encoders")
    parser.add_argument("--threads", type=positive_number, default=2)
    parser.add_argument("--only", choices=("server", "streams", "encoder"), help="a part alone")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
