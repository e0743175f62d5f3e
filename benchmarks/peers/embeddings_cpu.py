"""Vectors of texts on the CPU: quire beside sentence-transformers, or `transformers`, by turns.

    python -m benchmarks.peers.embeddings_cpu MODEL [--texts 512] [--tokens 64] [--dtype float32]
        [--peer-dtype float32] [--turns 7] [--threads 2] [--output FILE]

MODEL is the folder of a sentence encoder such as all-MiniLM-L6-v2. All compute the same texts of
random words, so many tokens each, special ones included. Figures are texts per second. The vectors
of all are compared. The peer computes in batches of 32, the default of sentence-transformers:
`sentence_transformers` where it is installed, else `transformers` with the mean of the states and
the scaling that it has.
"""

# ruff: isort: skip_file
# quire_engine settles how threads wait before torch is imported
from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import benchmarks.peers.engines.quire_engine  # noqa: F401
from benchmarks.arguments import command_line
import numpy as np
import torch

from quire.entrypoints.bench.record import new_record, spread_of
from quire.entrypoints.llm import LLM

PEER_BATCH = 32
CLOSE = {"float32": 1e-4, "bfloat16": 0.05}
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night"
)

Encode = Callable[[list[str]], np.ndarray]


def make_texts(llm: LLM, count: int, num_tokens: int, seed: int) -> list[str]:
    """Texts of exactly so many tokens: each word is one."""
    rng = random.Random(seed)
    tokenizer = llm.engine.renderer.tokenizer
    assert tokenizer is not None
    words = [word for word in WORDS.split() if len(tokenizer.encode(word)) == 3]
    return [" ".join(rng.choices(words, k=num_tokens - 2)) for _ in range(count)]


def by_quire(llm: LLM) -> Encode:
    def encode(texts: list[str]) -> np.ndarray:
        return np.array([each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)])

    return encode


def by_sentence_transformers(folder: Path, dtype: str) -> Encode:
    from sentence_transformers import (  # pyright: ignore[reportMissingImports]
        SentenceTransformer,
    )

    model = SentenceTransformer(
        str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)}
    )
    return lambda texts: model.encode(texts, batch_size=PEER_BATCH, normalize_embeddings=True)


def by_transformers(folder: Path, dtype: str) -> Encode:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def encode(texts: list[str]) -> np.ndarray:
        found: list[torch.Tensor] = []
        for start in range(0, len(texts), PEER_BATCH):
            inputs = tokenizer(texts[start : start + PEER_BATCH], padding=True, return_tensors="pt")
            hidden = model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            mean = (hidden * mask).sum(1) / mask.sum(1)
            found.append(torch.nn.functional.normalize(mean, dim=1))
        return torch.cat(found).numpy()

    return encode


def main() -> int:
    options = parse_arguments()
    llm = LLM(str(options.model), dtype=options.dtype, quiet=True, num_threads=options.threads)
    has_peer = find_spec("sentence_transformers") is not None
    peer = "sentence-transformers" if has_peer else "transformers"
    make_peer = by_sentence_transformers if has_peer else by_transformers
    peer_dtype = options.peer_dtype or options.dtype
    contenders = {"quire": by_quire(llm), peer: make_peer(options.model, peer_dtype)}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, options.turns):  # the first does not count
        texts = make_texts(llm, options.texts, options.tokens, options.seed + turn + 1)
        vectors: dict[str, np.ndarray] = {}
        for name, encode in contenders.items():
            torch.set_num_threads(options.threads if name == peer else 1)
            started = time.perf_counter()
            vectors[name] = encode(texts)
            if turn >= 0:
                rates[name].append(options.texts / (time.perf_counter() - started))
        apart = float(np.abs(vectors["quire"] - vectors[peer]).max())
        if apart > CLOSE[options.dtype]:
            raise SystemExit(f"vectors differ by {apart:g}")
    for name, found in rates.items():
        spread = spread_of(found)
        print(f"{name:24} {spread.median:8.1f} texts/s  [{spread.low:.1f}, {spread.high:.1f}]")
    ratio = spread_of([a / b for a, b in zip(rates["quire"], rates[peer], strict=True)])
    print(f"{'quire / ' + peer:24} {ratio.median:8.2f}  [{ratio.low:.2f}, {ratio.high:.2f}]")
    if options.output is not None:
        workload = {
            "texts": options.texts, "tokens": options.tokens, "turns": options.turns,
            "dtype": options.dtype, "peer": peer, "peer_dtype": peer_dtype,
            "peer_batch": PEER_BATCH,
        }  # fmt: skip
        figures = {f"{name} [texts/s]": spread_of(found) for name, found in rates.items()}
        record = new_record(
            "embeddings_cpu", command_line(), llm.engine.resolved, None, seed=options.seed,
            workload=workload, figures={**figures, "quire over peer": ratio},
        )  # fmt: skip
        record.save(options.output)
    llm.shutdown()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a sentence encoder")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--dtype", choices=tuple(CLOSE), default="float32")
    parser.add_argument("--peer-dtype", choices=tuple(CLOSE), help="that of quire")
    parser.add_argument("--turns", type=int, default=7, help="of each contender")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
