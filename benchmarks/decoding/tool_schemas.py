"""Grammars of real tool schemas: the functions of the Berkeley Function Calling Leaderboard.

    pip download --no-deps -d data bfcl-eval
    python -m benchmarks.decoding.tool_schemas data/*.whl
        --output benchmarks/results/tool_schemas.json

Reports how long each function's grammar takes to compile, with its first mask, which are refused,
and what a random model under `tool_choice: required` writes: all of its calls are parsed, and
validated by jsonschema. No number depends on a model.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from benchmarks.arguments import positive_number
from llguidance import LLMatcher
from tests.dialect.answers import read
from tests.dialect.models import library, tokenizer, walk

from quire.base.errors import RequestError
from quire.bundled import bundled_model_path
from quire.plan.grammar.source import grammar_text
from quire.text.dialect import AnswerParser, Dialect, Tool, answer_grammar
from quire.text.dialect.families import DIALECTS
from quire.text.rendering import Tokenizer

_TYPES = {
    "dict": "object", "HashMap": "object", "float": "number", "double": "number", "tuple": "array",
    "Array": "array", "ArrayList": "array", "String": "string", "char": "string", "any": "string",
    "long": "integer", "Boolean": "boolean", "": "string",
}  # fmt: skip
"""Types of other languages as the leaderboard's own harness reads them."""


def functions(wheel: Path) -> list[dict[str, Any]]:
    """All distinct functions, in the order of the files."""
    found: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            folder, _, file = name.rpartition("/")
            is_cases = folder == "bfcl_eval/data" and "format_sensitivity" not in file
            if not (is_cases or folder.endswith("func_doc")) or not file.endswith(".json"):
                continue
            for line in archive.read(name).decode().splitlines():
                for function in _functions_of(json.loads(line)):
                    found.setdefault(json.dumps(function, sort_keys=True), function)
    return list(found.values())


def _functions_of(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for each in [entry] if "parameters" in entry else entry.get("function", []):
        if "parameters" in each:
            yield each


def translated(schema: Any) -> Any:
    """The schema with the types of JSON."""
    if isinstance(schema, list):
        return [translated(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: translated(value) for key, value in schema.items()}
    kind = found.get("type")
    if isinstance(kind, str):
        found["type"] = _TYPES.get(kind, kind)
    return found


def compile_seconds(dialect: Dialect, tokens: Tokenizer, tool: Tool) -> float:
    """Time the grammar of one tool and its first mask. Raises RequestError if it is refused."""
    spec = answer_grammar(dialect, [tool], "required")
    assert spec is not None
    started = time.perf_counter()
    matcher = LLMatcher(library(tokens), grammar_text(spec), log_level=0)
    if matcher.is_error():
        raise RequestError(matcher.get_error().split("\n")[0])
    mask = np.zeros(-(-tokens.vocab_size // 32), np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return time.perf_counter() - started


def compiled(dialect: Dialect, tokens: Tokenizer, tools: list[Tool]) -> tuple[dict[str, Any], list]:
    """Figures of all, and the tools that were not refused."""
    seconds: list[float] = []
    refused: Counter[str] = Counter()
    held: list[Tool] = []
    compile_seconds(dialect, tokens, Tool("warm"))
    for tool in tools:
        try:
            seconds.append(compile_seconds(dialect, tokens, tool))
            held.append(tool)
        except RequestError as error:
            refused[str(error)[:160]] += 1
    figures = {
        "functions": len(tools),
        "refused": sum(refused.values()),
        "reasons": dict(refused.most_common()),
        "compile_ms": {
            name: round(1000 * float(np.percentile(seconds, share)), 3)
            for name, share in (("p50", 50), ("p99", 99), ("max", 100))
        },
    }
    return figures, held


def called(dialect: Dialect, tokens: Tokenizer, tools: list[Tool], count: int) -> dict[str, int]:
    """Count the outcomes of `count` answers of a random model, each to one tool."""
    rng = random.Random(0)
    result = Counter(asked=0, ended=0, calls=0, parsed=0, valid=0)
    phrases = [dialect.parameter.close] if dialect.parameter else []
    while result["ended"] < count and result["asked"] < 3 * count:
        tool = rng.choice(tools)
        spec = answer_grammar(dialect, [tool], "required", parallel=False)
        assert spec is not None
        result["asked"] += 1
        ids = walk(spec, tokens, result["asked"], most=1500, phrases=phrases)
        if ids is None:
            continue
        result["ended"] += 1
        parser = AnswerParser(dialect, tokens, [tool])
        parts = [part for token_id in ids for part in parser.take([token_id])]
        answer = read([*parts, *parser.finish()])
        result["calls"] += len(answer.calls)
        for name, arguments in answer.calls:
            result["parsed"] += name == tool.name
            checker = jsonschema.Draft202012Validator(dict(tool.schema))
            result["valid"] += checker.is_valid(arguments)
    return dict(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--calls", type=positive_number, default=500)
    parser.add_argument("--others", type=positive_number, default=60, help="calls of other formats")
    asked = parser.parse_args()
    logging.getLogger("quire.grammar").setLevel(logging.ERROR)
    found = functions(asked.wheel)
    tools = [
        Tool(each["name"], translated(each["parameters"]), description=each["description"])
        for each in found
    ]
    bundled = Tokenizer.from_folder(bundled_model_path())
    dialect = DIALECTS["quire"].bound(bundled)
    figures, held = compiled(dialect, bundled, tools)
    strict = [Tool(tool.name, tool.parameters, is_strict=True) for tool in tools]
    foreign = [
        Tool(each["name"], each["parameters"])
        for each in found
        if translated(each["parameters"]["properties"]) != each["parameters"]["properties"]
    ]
    report: dict[str, Any] = {
        "source": asked.wheel.name,
        "machine": platform.processor() or platform.machine(),
        "vocabulary": bundled.vocab_size,
        "lenient": figures,
        "strict": compiled(dialect, bundled, strict)[0],
        "types_of_other_languages": compiled(dialect, bundled, foreign)[0],
        "required": {"quire": called(dialect, bundled, held, asked.calls)},
    }
    sample = random.Random(1).sample(held, 100)
    for name in ("hermes", "qwen3_coder", "glm45", "deepseek_v32", "pythonic", "mistral"):
        family = DIALECTS[name]
        tokens = tokenizer(family.markers)
        bound = family.bound(tokens)
        fitting = compiled(bound, tokens, sample)
        report[f"lenient_{name}"] = fitting[0]
        report["required"][name] = called(bound, tokens, fitting[1], asked.others)
    text = json.dumps(report, indent=2, ensure_ascii=False)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
