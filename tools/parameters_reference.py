"""Write `docs/sampling-parameters.md` from the declarations of the parameters.

python -m tools.parameters_reference
"""

from __future__ import annotations

import json
from pathlib import Path

from quire.entrypoints.cli.flags.fields import as_flag
from quire.protocol.parameters.declaration import MAX_INT, Declared
from quire.protocol.sampling_params import SAMPLING_PARAMETERS

REFERENCE = Path(__file__).parents[1] / "docs" / "sampling-parameters.md"

_HEAD = """# Sampling parameters

Each parameter has one name: `SamplingParams(top_k=20)` in Python, `"top_k": 20` in a request,
`--top-k 20` for `quire chat` and `quire complete`. A value out of bounds is refused with its name.
What you leave out has the default, or the value that the model recommends
([the server](server.md#requests)). Python takes all of them. "Every API" means completions, chats,
[messages](messages.md) and [responses](responses.md).

`python -m tools.parameters_reference` writes this page from the declarations in
`src/quire/protocol/sampling_params.py`.

| name | default | values | requests | flag | meaning |
|---|---|---|---|---|---|
"""

_TAKEN_BY = {"python": "", "openai": "completions, chats", "all": "every API"}


def render_reference() -> str:
    """The whole page."""
    return _HEAD + "".join(_row(each) for each in SAMPLING_PARAMETERS.values())


def _row(each: Declared) -> str:
    facts = each.facts
    default = f"`{getattr(each.default, 'name', each.default)}`"
    if each.default in (None, ()):
        default = ""
    elif facts.most is not None:
        default = f"`{json.dumps(each.default)}`"
    elif each.kind is float:
        default = f"`{each.default:g}`"
    cells = (
        f"`{each.name}`",
        default,
        _values(each),
        _TAKEN_BY[facts.apis],
        f"`{as_flag(each.name)}`" if facts.has_flag else "",
        f"{facts.text}. {facts.note}".strip(),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _values(each: Declared) -> str:
    """Type and bounds."""
    facts = each.facts
    kinds = {int: "integer", float: "number", bool: "true or false"}
    if facts.most is not None:
        return f"at most {facts.most} texts of 1 to {facts.most_chars} characters"
    if each.kind is None:
        return ""
    found = kinds[each.kind]
    if abs(facts.low) < MAX_INT:
        found += f", at least {facts.low:g}"
        if abs(facts.high) < MAX_INT:
            found = f"{kinds[each.kind]}, {facts.low:g} to {facts.high:g}"
    return found


if __name__ == "__main__":
    REFERENCE.write_text(render_reference())
