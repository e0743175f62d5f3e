"""The headline tables of docs/benchmarks.md hold the numbers of the committed results."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
FOLDERS = {"Zen 4": "cpu_turns_zen4", "A processor with AMX": "cpu_turns_amx"}
FIGURES = ("prefill", "decode_1", "decode_4", "decode_16", "decode_32")
OTHERS = {"bfloat16": "FP16", "int8": "INT8", "int4": "INT4", "int4-g128-sym": "INT4"}
"""OpenVINO's weights beside each of ours."""


def rates(folder: str, file: str) -> list[list[float]]:
    """Tokens per second of each figure, by turn."""
    figures = json.loads((RESULTS / folder / file).read_text(encoding="utf-8"))["figures"]
    return [figures[f"{name}_tokens_per_s"]["values"] for name in FIGURES]


def rows(heading: str) -> list[tuple[str, list[str]]]:
    section = PAGE.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(row[0], row[1:]) for row in cells]


@pytest.mark.parametrize("heading", FOLDERS)
def test_headlines_are_those_of_the_results(heading: str):
    """Turns red when results are replaced and the page is not, or a cell is mistyped."""
    table = rows(heading)
    assert len(table) == 6
    for weights, cells in table:
        name, _, cache = weights.partition(", ")
        ours = rates(FOLDERS[heading], f"quire_{name}{'_kv8' if cache else ''}.json")
        theirs = rates(FOLDERS[heading], f"openvino_{OTHERS[name]}.json")
        for cell, own, other in zip(cells, ours, theirs, strict=True):
            rate, ratio = re.fullmatch(r"([\d,]+) \(([\d.]+)\)", cell).groups()  # pyright: ignore
            assert float(rate.replace(",", "")) == pytest.approx(statistics.median(own), abs=0.51)
            turns = [a / b for a, b in zip(own, other, strict=True)]
            assert float(ratio) == pytest.approx(statistics.median(turns), abs=0.006)


READINGS = (
    ("quire", ("quire, bfloat16", "quire, int8", "quire, int4", None)),
    ("quire, 16-bit activations", (None, "quire, int8_a16", None, None)),
    ("OpenVINO GenAI", (None, "OpenVINO GenAI, INT8", None, None)),
    ("OpenVINO GenAI, activations kept", (None, "OpenVINO GenAI, INT8, exact", None, None)),
    ("llama.cpp (8 bits: Q8_0)", (None, "llama.cpp, Q8_0", None, "llama.cpp, Q4_1")),
    ("quire, the same files", (None, "quire, Q8_0", None, "quire, Q4_1")),
)
"""Rows of the table of quality, with the readings of peer_quality.json."""


def test_qualities_are_those_of_the_results():
    """Turns red when the readings are measured again and the page is not, or a row is lost."""
    found = json.loads((RESULTS / "peer_quality.json").read_text(encoding="utf-8"))["figures"]
    table = rows("Quality of the formats")
    assert [name for name, _ in table] == [name for name, _ in READINGS]
    for (_, cells), (_, readings) in zip(table, READINGS, strict=True):
        divergences = (name and f"{found[f'{name}: KL']['median']:.4f}" for name in readings)
        assert cells == [each or "" for each in divergences]


def scripts() -> list[Path]:
    """The Python files of the folders by subject; a GPU's parts are one script."""
    found = (ROOT / "benchmarks").glob("*/*.py")
    return sorted(path for path in found if path.parent.name != "gpu")


def test_the_readme_lists_every_script():
    """Turns red when a benchmark is added, moved or taken away without its line."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([a-z]+)` \|(.*)$", text, re.MULTILINE)
    listed = [(folder, name) for folder, rest in lines for name in re.findall(r"`(\w+\.py)`", rest)]
    assert sorted(listed) == sorted((path.parent.name, path.name) for path in scripts())
    assert "gpu" in dict(lines)


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.stem)
def test_a_script_says_how_it_is_run(path: Path):
    """Turns red when a script is moved, and the command in its first lines is not."""
    text = path.read_text(encoding="utf-8")
    if "__main__" in text:
        command = f"python -m benchmarks.{path.parent.name}.{path.stem} "
        assert command in text.split('"""')[1].replace("\n", " ")
