"""The pages under docs/: their length, their paragraphs, and the links between them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WIDTH, MAX_LINES = 100, 5
MAX_ROW = 300
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    """All pages of the project, the front page and the how-tos included."""
    top = (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
    return [*top, *sorted(DOCS.rglob("*.md"))]


def prose(text: str) -> str:
    """Return the text without blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and list items, each on one line; tables and headings are left out."""
    lines: list[str] = []
    for line in [*prose(text).splitlines(), ""]:
        stripped = line.strip()
        starts = re.match(r"([-*]|\d+\.) ", stripped)
        if lines and (not stripped or starts or stripped.startswith(("#", "|"))):
            yield " ".join(lines)
            lines = []
        if stripped and not stripped.startswith(("#", "|")):
            lines.append(stripped)


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def test_architecture_stays_short():
    text = (DOCS / "architecture.md").read_text()
    assert len(text.split()) <= 2000
    assert text.count("```mermaid") == 1


def test_benchmarks_stay_short():
    """Turns red when details or older runs come back to the page of headlines."""
    assert len((DOCS / "benchmarks.md").read_text().split()) <= 2500


def test_the_changelog_stays_short():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 130


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_paragraphs_are_short(page: Path):
    text = page.read_text()
    long = [found for found in paragraphs(text) if len(textwrap.wrap(found, WIDTH)) > MAX_LINES]
    assert not long, f"more than {MAX_LINES} lines of {WIDTH}: " + "\n\n".join(long)


def test_a_long_paragraph_is_found():
    item = "- " + "word " * 120
    assert [len(textwrap.wrap(found, WIDTH)) for found in paragraphs(f"short\n\n{item}")] == [1, 7]
    assert not list(paragraphs("# heading\n\n| a | table |\n\n```\ncode\n```\n"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_tables_are_short(page: Path):
    rows = [line for line in prose(page.read_text()).splitlines() if line.startswith("|")]
    assert not [row for row in rows if len(row) > MAX_ROW], "make two rows of each"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    broken: list[str] = []
    for link in LINK.findall(prose(page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken
