"""Compile times of the ten largest real schemas: quire's, llguidance alone, xgrammar alone.

    pip download --no-deps -d data check-jsonschema
    pip install --no-deps --target data/xgrammar xgrammar apache-tvm-ffi
    PYTHONPATH=data/xgrammar python -m benchmarks.decoding.schema_compile data/*.whl
        --output benchmarks/results/schema_compile.json

The schemas are those that `check-jsonschema` brings along. Each library compiles each of them in a
process of its own, under a limit, for the same made-up vocabulary, and makes the first mask; its
set-up is not counted. *quire* is all that a request waits for: the trial in a child, and the
compilation. Keywords that cannot be held to are dropped where a library can be told so. A library
that is not installed is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.arguments import positive_number
from llguidance import LLMatcher

from quire.base.errors import RequestError
from quire.entrypoints.bench.machine import current_commit, describe_machine
from quire.plan.grammar.guidance import GuidanceGrammars
from quire.plan.grammar.vocabulary import Vocabulary, spelled_by_bytes
from quire.protocol.grammar import StructuredOutputsParams
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

FOLDER = "check_jsonschema/builtin_schemas/vendor/"
COUNT = 10


def main() -> int:
    options = parse_arguments()
    if options.one is not None:
        sys.stdout.write(json.dumps(compiled(options.one, sys.stdin.read(), options.vocabulary)))
        return 0
    libraries = [name for name in LIBRARIES if name == "quire" or find_spec(name) is not None]
    found: dict[str, dict[str, Any]] = {}
    for name, text in largest(options.wheel).items():
        found[name] = {"bytes": len(text.encode())}
        for library in libraries:
            found[name][library] = in_child(library, text, options)
        print(name, json.dumps(found[name]), flush=True)
    if options.output is not None:
        report = {
            "benchmark": "schema_compile",
            "commit": current_commit(),
            "source": options.wheel.name,
            "machine": dataclasses.asdict(describe_machine()),
            "vocabulary": options.vocabulary,
            "limit_s": options.limit,
            "schemas": found,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="of check-jsonschema")
    parser.add_argument("--vocabulary", type=positive_number, default=151_936, help="tokens")
    parser.add_argument(
        "--limit",
        type=positive_number,
        default=120,
        help="seconds of each process, set-up and all (120)",
    )
    parser.add_argument("--one", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def largest(wheel: Path) -> dict[str, str]:
    """The texts of the largest schemas, by name."""
    with zipfile.ZipFile(wheel) as archive:
        files = [
            each
            for each in archive.infolist()
            if each.filename.startswith(FOLDER) and each.filename.endswith(".json")
        ]
        files.sort(key=lambda each: -each.file_size)
        return {
            each.filename.removeprefix(FOLDER): archive.read(each).decode()
            for each in files[:COUNT]
        }


def in_child(library: str, text: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of `compiled`, in a process that is ended at the limit."""
    command = [sys.executable, "-m", "benchmarks.decoding.schema_compile", str(options.wheel)]
    command += ["--one", library, "--vocabulary", str(options.vocabulary)]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=options.limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"refused": f"more than {options.limit} s"}
    if done.returncode:
        return {"refused": f"ended with status {done.returncode}"}
    return json.loads(done.stdout)


def compiled(library: str, text: str, size: int) -> dict[str, Any]:
    """Milliseconds, or why there is no grammar."""
    compile_one = LIBRARIES[library](vocabulary(size))
    compile_one('{"type": "integer"}')
    started = time.perf_counter()
    try:
        compile_one(text)
    except (RequestError, RuntimeError, ValueError) as error:
        seconds = time.perf_counter() - started
        return {"refused": str(error).split("\n")[0][:200], "ms": 1000 * seconds}
    return {"ms": 1000 * (time.perf_counter() - started)}


def vocabulary(size: int) -> Vocabulary:
    """Bytes, and words of random letters."""
    rng = np.random.default_rng(0)
    letters = list('abcdefghijklmnopqrstuvwxyz0123456789 "{}[],:.')
    words = dict.fromkeys([b"\xff<end>", *(bytes([value]) for value in range(256))])
    while len(words) < size:
        words["".join(rng.choice(letters, int(rng.integers(2, 9)))).encode()] = None
    return Vocabulary(list(words), [0], 0)


def by_quire(vocabulary: Vocabulary) -> Callable[[str], None]:
    grammars = GuidanceGrammars(lambda: (vocabulary, spelled_by_bytes(vocabulary)), [0])

    def compile_one(text: str) -> None:
        spec = StructuredOutputsParams(json=text, strict=False).spec
        request = EngineRequest(
            "a", 0, np.array([1], np.int32), SamplingParams(), 0, frozenset({0}), grammar=spec
        )
        none = np.zeros(0, np.int32)
        grammars.open(request).result().matcher().masks(none, none)

    return compile_one


def by_llguidance(vocabulary: Vocabulary) -> Callable[[str], None]:
    tokenizer = vocabulary.tokenizer(spelled_by_bytes(vocabulary))
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)

    def compile_one(text: str) -> None:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"lenient": True})
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    return compile_one


def by_xgrammar(vocabulary: Vocabulary) -> Callable[[str], None]:
    import xgrammar

    tokens = xgrammar.TokenizerInfo(
        list(vocabulary.tokens), xgrammar.VocabType.RAW, stop_token_ids=[vocabulary.eos_id]
    )
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    mask = xgrammar.allocate_token_bitmask(1, tokens.vocab_size)

    def compile_one(text: str) -> None:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(text))
        matcher.fill_next_token_bitmask(mask)

    return compile_one


LIBRARIES: dict[str, Callable[[Vocabulary], Callable[[str], None]]] = {
    "quire": by_quire,
    "llguidance": by_llguidance,
    "xgrammar": by_xgrammar,
}


if __name__ == "__main__":
    sys.exit(main())
