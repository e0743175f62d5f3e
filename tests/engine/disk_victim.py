"""An engine over a disk that is killed at any moment. Its arguments: MODEL FOLDER LIMIT SEED.

It answers prompts without an end, those that it chooses by the seed, a line of JSON for each.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from quire import LLM
from tests.engine.test_laws import params
from tests.small_engines import SMALL

__all__ = ["NUM_PROMPTS", "answer", "main", "prompt"]

NUM_PROMPTS = 12


def prompt(index: int) -> list[int]:
    """Half of the prompts share their first half with the one before."""
    seed = index - 1 if index % 2 else index
    tokens = np.random.default_rng(seed).integers(5, 900, 52).tolist()
    return [*tokens[:26], *np.random.default_rng(1000 + index).integers(5, 900, 26).tolist()]


def answer(llm: LLM, index: int) -> list[int]:
    """The tokens after a prompt."""
    found = llm.generate({"prompt_token_ids": prompt(index)}, params(index, 10), use_tqdm=False)
    return list(found[0].outputs[0].token_ids)


def main() -> int:
    model, folder, limit, seed = sys.argv[1:]
    settings = {**SMALL, "num_kv_blocks": 64, "kv_disk": folder, "kv_disk_bytes": int(limit)}
    llm = LLM(model, **settings)
    _say("ready")
    rng = np.random.default_rng(int(seed))
    while True:
        index = int(rng.integers(NUM_PROMPTS))
        tokens = answer(llm, index)
        stats = llm.engine.client.stats()
        line = {"index": index, "tokens": tokens, "loaded": stats.blocks_loaded_total}
        _say(json.dumps(line))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
