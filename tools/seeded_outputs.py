"""Write or compare 200 seeded outputs: models × formats × depth × preemption.

    python -m tools.seeded_outputs --write /tmp/before.json     # on the old commit
    python -m tools.seeded_outputs --compare /tmp/before.json   # on the new one

A refactoring must leave every byte of them as it was. The file belongs to one machine: sums in 16
bits depend on its instruction set.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tests.models.families import CASES, write_checkpoint

from quire import LLM, BeamSearchParams, SamplingParams
from quire.base.platform import detect_platform

FAMILIES = ("qwen2-mixed", "mistral-window", "gemma2", "opt")
FORMATS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
)
DEPTHS = (1, 2, 3)
POOLS = {"roomy": 256, "preempting": 48}
REQUESTS = 4


def main() -> int:
    """Write the outputs, or compare them. 1 when one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", type=Path, metavar="FILE")
    mode.add_argument("--compare", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = outputs()
    if options.write is not None:
        options.write.write_text(_lines(found))
        print(f"{len(found)} outputs written to {options.write}")
        return 0
    expected = json.loads(options.compare.read_text())
    differing = sorted(name for name in expected | found if expected.get(name) != found.get(name))
    for name in differing:
        print(f"{name}: {expected.get(name)} before, {found.get(name)} now")
    print(f"{len(found)} outputs, {len(differing)} differ")
    return 1 if differing else 0


def outputs() -> dict[str, Any]:
    """Compute all outputs by name, the processor's features first."""
    found: dict[str, Any] = {"machine": " ".join(sorted(detect_platform().cpu.features))}
    with TemporaryDirectory() as temporary:
        folders = {"bundled": None} | {name: Path(temporary) / name for name in FAMILIES}
        for name, folder in folders.items():
            if folder is not None:
                write_checkpoint(next(case for case in CASES if case.name == name), folder)
        for (name, folder), form, depth, pool in itertools.product(
            folders.items(), FORMATS, DEPTHS, POOLS
        ):
            label = f"{name} {' '.join(form.values())} depth {depth} {pool}"
            run = _run(folder, depth=depth, num_kv_blocks=POOLS[pool], **form)
            for i, output in enumerate(run):
                found[f"{label} request {i}"] = output
    return found


def _run(folder: Path | None, **settings: Any) -> Iterator[Any]:
    llm = LLM(
        None if folder is None else str(folder),
        quiet=True,
        skip_tokenizer_init=True,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=64,
        **settings,
    )
    try:
        rng = np.random.default_rng(1)
        prompts = [{"prompt_token_ids": rng.integers(3, 120, n).tolist()} for n in (17, 30, 9, 23)]
        params = [
            SamplingParams(
                temperature=0.0 if i % 2 == 0 else 0.8,
                seed=i,
                n=1 + i % 2,
                max_tokens=16,
                ignore_eos=True,
                logprobs=2,
                repetition_penalty=1.0 if i < 2 else 1.1,
            )
            for i in range(REQUESTS)
        ]
        for output in llm.generate(prompts, params, use_tqdm=False):
            yield [[list(each.token_ids), _digest(each.logprobs)] for each in output.outputs]
        beams = BeamSearchParams(beam_width=2, max_tokens=8)
        for output in llm.beam_search(prompts[:1], beams, use_tqdm=False):
            yield [[list(each.tokens), repr(each.cum_logprob)] for each in output.sequences]
    finally:
        llm.shutdown()
        gc.collect()


def _lines(found: dict[str, Any]) -> str:
    """One output per line."""
    return ",\n".join(json.dumps({name: value})[1:-1] for name, value in found.items()).join(
        ("{\n", "\n}\n")
    )


def _digest(logprobs: Any) -> str:
    """To the bit: a float's repr is exact."""
    text = repr([{token: each.logprob for token, each in entry.items()} for entry in logprobs])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
