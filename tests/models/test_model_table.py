"""The tables of families in the docs follow from the declarations of the families and from the
cases that are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.families import CASES
from tools.model_table import PAGES, render_page

from quire.config.families import FAMILIES


def test_every_name_belongs_to_one_family() -> None:
    """Turns red when a second declaration takes the place of the first in a registry."""
    for names in (
        [family.title for family in FAMILIES],
        [family.model_type for family in FAMILIES],
        [name for family in FAMILIES for name in family.readers],
        [(each.gguf.name, each.gguf.told_by) for each in FAMILIES if each.gguf is not None],
    ):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_is_up_to_date(page: Path) -> None:
    """Turns red when a family or a case is added without the page."""
    text = page.read_text(encoding="utf-8")
    assert text == render_page(page), "run python -m tools.model_table"


def test_every_family_is_compared() -> None:
    """Turns red when a family whose models draw tokens has no case."""
    page = next(page for page in PAGES if page.name == "models.md")
    rows = [line.split(" | ") for line in page.read_text(encoding="utf-8").splitlines()]
    compared = {row[0].removeprefix("| "): row[4].strip(" |") for row in rows if len(row) == 5}
    cases, drawing = {case.name for case in CASES}, ("ForCausalLM", "LMHeadModel")
    for family in FAMILIES:
        if family.architecture.endswith(drawing):
            assert compared[family.title].partition(",")[0] in cases
