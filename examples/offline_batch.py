"""Complete a file of prompts, one per line, and write one JSON object per prompt.

    python examples/offline_batch.py prompts.txt answers.jsonl [--model a/folder]

A prompt that cannot be served does not stop the others: its line has an error in place of a text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quire import LLM, SamplingParams


def complete(llm: LLM, prompts: list[str], max_tokens: int) -> list[dict[str, object]]:
    """Return one record per prompt, in their order. All prompts share one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    records: list[dict[str, object]] = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        if output.error is not None:
            records.append({"prompt": prompt, "error": str(output.error)})
            continue
        sample = output.outputs[0]
        records.append(
            {"prompt": prompt, "text": sample.text, "finish_reason": sample.finish_reason}
        )
    return records


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Complete a file of prompts.")
    parser.add_argument("prompts", type=Path, help="text file, one prompt per line")
    parser.add_argument("answers", type=Path, help="JSON lines to write")
    parser.add_argument("--model", help="the bundled one if unset")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    prompts = options.prompts.read_text(encoding="utf-8").splitlines()
    with LLM(options.model, quiet=True) as llm:
        records = complete(llm, prompts, options.max_tokens)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    options.answers.write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
