"""Write the tables of model families in `docs/models.md` and `README.md`, from the declarations
of the families and the cases of the tests.

python -m tools.model_table
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.models.families import CASES
from tests.models.family_bases import BASES

from quire.config import ModelSpec, read_model_spec
from quire.config.families import FAMILIES, Family

ROOT = Path(__file__).parents[1]
START, END = "<!-- python -m tools.model_table writes this table -->\n", "\n<!-- end of it -->"

MOST_CASES = 6
"""Cases of a family that a row names: the rest is a number."""

_CLASS_HEADS, _ENCODERS = "`tests/test_class_heads.py`", "`tests/test_encoders.py`"
_DRAWING = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of decoders with a head for logits."""

_SCORES = {"soft_cap": "caps", "alibi_slopes": "ALiBi", "sinks": "sinks"}


def render_page(page: Path) -> str:
    """Return the text of a page of `PAGES` with the table of today."""
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    return before + START + "\n".join(PAGES[page]()) + "\n" + END + after


def _short_rows() -> Iterator[str]:
    yield "| family | architectures |"
    yield "|---|---|"
    for family in FAMILIES:
        yield f"| {family.title} | {_names(family)} |"


def _long_rows() -> Iterator[str]:
    specs = _specs()
    yield "| family | architectures | kind | GGUF | compared with `transformers` |"
    yield "|---|---|---|---|---|"
    for family in FAMILIES:
        found = {case: spec for case, spec in specs if spec.architecture in family.readers}
        compared = [*found][:MOST_CASES] or [_ENCODERS]
        if len(found) > MOST_CASES:
            compared.append(f"{len(found) - MOST_CASES} more")
        if found and not all(name.endswith(_DRAWING) for name in family.readers):
            compared.append(_CLASS_HEADS)
        kind = ", ".join(_kinds(found.values())) or "encoder"
        in_gguf = "" if family.gguf is None else "yes"
        cases = ", ".join(compared)
        yield f"| {family.title} | {_names(family)} | {kind} | {in_gguf} | {cases} |"


def _names(family: Family) -> str:
    return ", ".join(f"`{name}`" for name in family.readers)


def _kinds(specs: Iterable[ModelSpec]) -> list[str]:
    """Return words on what layers of these models have, each once."""
    words: dict[str, None] = {}
    for spec in specs:
        words["dense" if spec.experts is None else "experts"] = None
        if spec.latent is not None:
            words["latent attention"] = None
        if any(window is not None for window in spec.windows):
            words["windows"] = None
        if spec.has_learned_positions:
            words["learned positions"] = None
        elif spec.states:
            words["recurrent states"] = None
        elif any(rope is None for rope in spec.ropes) and "alibi_slopes" not in spec.score_options:
            words["layers without positions"] = None
        for option in sorted(spec.score_options):
            words[_SCORES[option]] = None
    return list(words)


def _specs() -> list[tuple[str, ModelSpec]]:
    """The cases of the tests by name, as quire reads them."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: list[tuple[str, ModelSpec]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        for case in CASES:
            base = BASES.get(case.model_type, {})
            config: Any = CONFIG_MAPPING[case.model_type](**{**base, **case.extra})
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.model_type]]
            file.write_text(json.dumps({**config.to_dict(), "dtype": "float32"}))
            found.append((case.name, read_model_spec(Path(folder))))
    return found


PAGES: Mapping[Path, Callable[[], Iterator[str]]] = MappingProxyType(
    {ROOT / "docs" / "models.md": _long_rows, ROOT / "README.md": _short_rows}
)
"""Pages that hold a table, and the lines of each."""


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(render_page(file), encoding="utf-8")
        print(f"wrote {file}")
