"""Count how many drafts of an EAGLE layer the bundled model accepts.

Run from the repository root:
    python tools/bundled_model/evaluate_head.py --output benchmarks/results/bundled_head.json

Texts are held-out library files and the scripted dialogues, which training held neither of the
model nor of the layer. The engine decodes them and verifies all drafts that it is offered, whatever
they cost, so the counts depend on no machine's speed. `accepted_at` is the share of a row's drafts
at each place that were right, given a step; `tokens_per_step` is what a row gets of a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus import load_corpus
from evaluate import SCRIPTED, prompt_of
from tokenizer import BUNDLED
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.plan.speculation import DraftPolicy

HEAD = BUNDLED / "eagle"
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 128


def library_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens from the middle of each held-out file."""
    found: list[list[int]] = []
    for document in load_corpus().held_out:
        ids = tokenizer.encode(document.text, add_special_tokens=False).ids
        start = len(ids) // 2
        if len(ids) - start >= PROMPT_TOKENS:
            found.append(ids[start : start + PROMPT_TOKENS])
    return found


def dialogue_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts for the last answer of each scripted dialogue."""
    scripted: list[dict[str, Any]] = json.loads(SCRIPTED.read_text(encoding="utf-8"))
    texts = [prompt_of(entry["messages"], entry["tools"]) for entry in scripted]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def verify_everything(
    self: DraftPolicy,  # noqa: ARG001  takes the place of a method
    num_tokens: int,  # noqa: ARG001
    chances: Sequence[float],  # noqa: ARG001
    offered: Sequence[int],
    most: int,
) -> list[int]:
    """In place of `DraftPolicy.counts`: all that is offered, as far as there is room."""
    counts: list[int] = []
    for count in offered:
        counts.append(max(min(count, most - sum(counts)), 0))
    return counts


def count_accepted(
    options: argparse.Namespace, prompts: list[list[int]], temperature: float
) -> dict[str, Any]:
    """Decode the prompts, and count."""
    config = {
        "method": "eagle",
        "model": str(options.head),
        "num_speculative_tokens": options.drafts,
    }
    llm = LLM(None, quiet=True, max_model_len=1024, max_num_seqs=8, speculative_config=config)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=OUTPUT_TOKENS)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    stats = llm.engine.client.stats()
    llm.shutdown()
    rows = stats.drafted_rows_total
    return {
        "temperature": temperature,
        "prompts": len(prompts),
        "rows": rows,
        "drafts": stats.draft_tokens_total,
        "accepted": stats.accepted_drafts_total,
        "accepted_at": [round(count / rows, 4) for count in stats.accepted_drafts_at],
        "tokens_per_step": round(1 + stats.accepted_drafts_total / rows, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--head", type=Path, default=HEAD, help="folder of the layer")
    parser.add_argument("--drafts", type=int, default=4, help="of a row and step")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    DraftPolicy.counts = verify_everything  # pyright: ignore[reportAttributeAccessIssue]
    DraftPolicy.may_take = lambda *_: True  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    texts = {"library": library_prompts(tokenizer), "dialogues": dialogue_prompts(tokenizer)}
    found = {
        name: [count_accepted(options, prompts, each) for each in options.temperatures]
        for name, prompts in texts.items()
    }
    text = json.dumps({"drafts": options.drafts, **found}, indent=1) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
