"""The official suite of JSON Schema, and the instances that the grammars of its schemas let
through.

    pip download --no-binary :all: --no-deps -d data jsonschema
    python -m benchmarks.decoding.schema_suite data/jsonschema-*.tar.gz
        --output benchmarks/results/schema_suite.json

The source archive of `jsonschema` carries the suite. Each schema is compiled as a request's would
be, strict and not strict, for a vocabulary of single bytes, and each instance is followed through
it. An instance is written in every order of its outer keys, up to 24, and with keys that begin
with an escape (`\\u0061`). A valid one is *accepted* if one writing is; an invalid one is *let
through* if one writing is. Not strict, schemas from which a keyword is dropped are counted apart.
Files of `optional` that are about other things than values are left out, and formats that quire
does not hold are refused or dropped like any other keyword.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from quire.base.errors import RequestError
from quire.entrypoints.bench.machine import current_commit, describe_machine
from quire.plan.grammar import Grammar
from quire.plan.grammar.guidance import GuidanceGrammars
from quire.plan.grammar.vocabulary import Vocabulary, spelled_by_bytes
from quire.protocol.grammar import StructuredOutputsParams
from quire.protocol.json_schema import all_unsupported
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
"""Drafts, and how their schemas name them; the suite leaves it to the folder."""
EOS = 256
MAX_ORDERS = 24
OPTIONAL = ("bignum", "ecmascript-regex", "float-overflow", "non-bmp-regex", "format/")


def main() -> int:
    options = parse_arguments()
    vocabulary = Vocabulary([*(bytes([i]) for i in range(256)), b""], [EOS], EOS)
    grammars = GuidanceGrammars(lambda: (vocabulary, spelled_by_bytes(vocabulary)), [EOS])
    drafts = {draft: Draft() for draft in DRAFTS}
    for draft, name, case in cases(options.archive):
        if not options.only or options.only in name:
            drafts[draft].add(name, case, grammars)
    grammars.close()
    report = {
        "benchmark": "schema_suite",
        "commit": current_commit(),
        "source": options.archive.name,
        "machine": dataclasses.asdict(describe_machine()),
        "drafts": {name: draft.report() for name, draft in drafts.items()},
    }
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    sys.stdout.write(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0 if not any(draft.is_wrong for draft in drafts.values()) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path, help="source archive of jsonschema")
    parser.add_argument("--only", default="", help="part of the names of the files to run")
    parser.add_argument("--output", type=Path, help="file for the result as JSON")
    return parser.parse_args()


class Draft:
    """Counts of one draft."""

    def __init__(self) -> None:
        self._counts = {
            "strict": Counts(),
            "not strict": Counts(),
            "with keywords dropped": Counts(),
        }

    @property
    def is_wrong(self) -> bool:
        """Tell whether something invalid came through a schema that is held to in whole."""
        return any(self._counts[name].let_through for name in ("strict", "not strict"))

    def add(self, name: str, case: dict[str, Any], grammars: GuidanceGrammars) -> None:
        """Run the tests of one schema."""
        title = f"{name}: {case['description']}"
        self._counts["strict"].add(title, case, compiled(grammars, case["schema"], is_strict=True))
        kind = "with keywords dropped" if all_unsupported(case["schema"]) else "not strict"
        self._counts[kind].add(title, case, compiled(grammars, case["schema"], is_strict=False))

    def report(self) -> dict[str, Any]:
        found = {name: dataclasses.asdict(counts) for name, counts in self._counts.items()}
        dropped = found["with keywords dropped"]
        dropped["let_through"] = len(dropped["let_through"])  # as it has to be
        return found


@dataclasses.dataclass
class Counts:
    """Numbers of schemas and of instances; let_through and rejected name them."""

    schemas: int = 0
    refused: int = 0
    valid: int = 0
    invalid: int = 0
    let_through: list[str] = dataclasses.field(default_factory=list[str])
    rejected: list[str] = dataclasses.field(default_factory=list[str])

    def add(self, title: str, case: dict[str, Any], grammar: Grammar | str) -> None:
        self.schemas += 1
        if isinstance(grammar, str):
            self.refused += 1
            return
        for test in case["tests"]:
            is_in = any(accepts(grammar, text) for text in writings(test["data"]))
            self.valid += test["valid"]
            self.invalid += not test["valid"]
            if is_in != test["valid"]:
                wrong = self.let_through if is_in else self.rejected
                wrong.append(f"{title}: {test['description']}")


def cases(archive: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield draft, file and schema with its tests."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda each: each.name):
            _, found, name = member.name.partition("/json/tests/")
            draft, _, name = name.partition("/")
            name = name.removesuffix(".json")
            file = files.extractfile(member)
            if not found or draft not in DRAFTS or file is None:
                continue
            _, is_optional, rest = name.partition("optional/")
            if is_optional and not rest.startswith(OPTIONAL):
                continue
            for case in cast("list[dict[str, Any]]", json.load(file)):
                if isinstance(case["schema"], dict):
                    case["schema"].setdefault("$schema", DRAFTS[draft])
                yield draft, name, case


def compiled(grammars: GuidanceGrammars, schema: Any, *, is_strict: bool) -> Grammar | str:
    """Return a schema's grammar, or why it has none."""
    try:
        spec = StructuredOutputsParams(json=json.dumps(schema), strict=is_strict).spec
        request = EngineRequest(
            "", 0, np.zeros(1, np.int32), SamplingParams(), 0, frozenset([EOS]), grammar=spec
        )
        return grammars.open(request).result()
    except RequestError as error:
        return str(error)


def writings(value: Any) -> Iterator[str]:
    """Yield texts of a value."""
    yield json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict):
        return
    pairs = [
        (json.dumps(key, ensure_ascii=False), json.dumps(each, ensure_ascii=False))
        for key, each in cast("dict[str, Any]", value).items()
    ]
    for order in itertools.islice(itertools.permutations(pairs), MAX_ORDERS):
        yield f"{{{', '.join(f'{key}: {each}' for key, each in order)}}}"
    for place, (key, each) in enumerate(pairs):
        if key != '""' and key[1] != "\\":
            escaped = f'"\\u{ord(key[1]) & 0xFFFF:04x}{key[2:]}'
            rest = [pair for i, pair in enumerate(pairs) if i != place]
            for order in ([(escaped, each), *rest], [*rest, (escaped, each)]):
                yield f"{{{', '.join(f'{name}: {its}' for name, its in order)}}}"


def accepts(grammar: Grammar, text: str) -> bool:
    """Tell whether a text may end here."""
    output = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)
    try:
        (mask,) = grammar.matcher().masks(output, np.zeros(0, np.int32))
    except RequestError:
        return False
    return mask is not None and bool(mask[EOS // 32] >> np.uint32(EOS % 32) & 1)


if __name__ == "__main__":
    sys.exit(main())
