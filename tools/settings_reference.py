"""Write `docs/settings.md`, the list of all settings, from their declarations.

python -m tools.settings_reference
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from quire.config.settings import ALIASES, SECTIONS
from quire.entrypoints.cli.flags.fields import as_flag
from quire.server.settings import ServerSettings

REFERENCE = Path(__file__).parents[1] / "docs" / "settings.md"

_HEAD = """# Settings

Each setting has one name: `LLM(max_num_seqs=8)` in Python, `--max-num-seqs 8` on the command line,
`QUIRE_MAX_NUM_SEQS=8` in the environment, `max-num-seqs: 8` in a file given by `--config`.
What is unset or `auto` is chosen from the model and the machine; `quire plan` prints what, and why.

`python -m tools.settings_reference` writes this page from the declarations in
`src/quire/config/settings.py` and `src/quire/server/settings.py`.
"""


def render_reference() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, section in SECTIONS.items():
        parts.append(_table(f"{name.capitalize()} settings", section.__doc__, fields(section)))
    shown = [item for item in fields(ServerSettings) if item.name != "limits"]
    parts.append(_table("Server settings", "Of `quire serve` alone.", shown))
    return "\n".join(parts)


def _table(title: str, text: str | None, items: Iterable[Field[Any]]) -> str:
    rows = [f"\n## {title}\n", f"{text}\n", "| name | flag | default | values | meaning |"]
    rows += ["|---|---|---|---|---|", *(_row(item) for item in items), ""]
    return "\n".join(rows)


def _row(item: Field[Any]) -> str:
    names = [item.name, *(alias for alias, meant in ALIASES.items() if meant == item.name)]
    default = "" if item.default in (None, MISSING, "", ()) else f"`{item.default}`"
    flag = f"`{as_flag(item.name)}`"
    named = ", ".join(f"`{name}`" for name in names)
    meaning = item.metadata["help"].replace("|", "\\|")
    return f"| {named} | {flag} | {default} | {_values(item)} | {meaning} |"


def _values(item: Field[Any]) -> str:
    """Choices, or type and bounds."""
    rules = item.metadata
    if "choices" in rules:
        return ", ".join(f"`{choice}`" for choice in rules["choices"])
    kind = {"bytes": "size", "count": "count", "object": "JSON object"}.get(
        rules.get("kind", ""), ""
    )
    kind = kind or str(item.type).removesuffix(" | None").replace("|", "\\|")
    low, high = rules.get("low"), rules.get("high")
    if high is not None:
        return f"{kind}, {low} to {high}"
    return kind if low is None else f"{kind}, at least {low}"


if __name__ == "__main__":
    REFERENCE.write_text(render_reference())
