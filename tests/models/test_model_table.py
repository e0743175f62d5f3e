"""The table of families in docs/models.md is that of the registry and of the cases that are
compared."""

from __future__ import annotations

from tools.model_table import FAMILIES, PAGE, missing_families, render_page


def test_every_architecture_is_in_one_family() -> None:
    names = [name for each in FAMILIES.values() for name in each]
    assert len(names) == len(set(names))
    assert missing_families() == set()


def test_the_page_is_up_to_date() -> None:
    """Turns red when a family or a case is added without the page."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == render_page(text), "run python -m tools.model_table"


def test_every_family_is_compared() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "ForCausalLM" in line]
    table = [row for row in rows if row.startswith("| ")]
    assert all(row.split("|")[5].strip() for row in table)
