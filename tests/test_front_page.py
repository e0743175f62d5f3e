"""The tables of README.md name what the code has: no more and no less."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from quire.base.platform.gpu import MIN_CAPABILITY
from quire.compute.models.registry import ARCHITECTURES
from quire.config.env import CPU_ISAS, GPU_KERNELS
from quire.config.families import SUPPORTED_ARCHITECTURES
from quire.config.packed.settings import METHODS
from quire.config.quantization import QUANTIZATIONS
from quire.config.settings import SCHEDULING_POLICIES, setting_fields
from quire.entrypoints.cli.main import COMMANDS
from quire.protocol.grammar import GrammarKind

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _kv_cache_dtypes() -> set[str]:
    (setting,) = (item for item in setting_fields() if item.name == "kv_cache_dtype")
    return set(setting.metadata["choices"]) - {"auto"}


FEATURES: dict[str, Callable[[], set[str]]] = {
    "Commands": lambda: set(COMMANDS),
    "Scheduling policies": lambda: set(SCHEDULING_POLICIES),
    "Structured output": lambda: {str(kind) for kind in GrammarKind} - {"answer"},
    "Quantized while loading": lambda: set(QUANTIZATIONS),
    "Quantized checkpoints": lambda: set(METHODS),
    "KV cache formats": _kv_cache_dtypes,
}
"""Rows of the table of features, with the registry of each."""


def section(heading: str) -> str:
    return README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(heading: str) -> list[list[str]]:
    """Return the cells of each row of the table under a heading, without its head."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


@pytest.mark.parametrize("feature", FEATURES)
def test_features_are_those_of_the_registries(feature: str):
    """Turns red when a name is added to or taken from a registry without the front page."""
    table = dict(rows("Features"))
    assert names(table[feature]) == FEATURES[feature]()


def test_every_row_of_features_is_checked():
    assert [name for name, _ in rows("Features")] == list(FEATURES)


def test_model_families_are_those_of_the_registry():
    listed = [name for _, cell in rows("Model families") for name in sorted(names(cell))]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(ARCHITECTURES) == set(SUPPORTED_ARCHITECTURES)
    assert f"{len(listed)} names" in section("Comparison with other engines")


def test_hardware_is_that_of_the_kernels():
    cpu, plain, gpu = rows("Hardware")
    assert names(cpu[1]) | names(plain[1]) == set(CPU_ISAS)
    assert names(gpu[1]) == set(GPU_KERNELS)
    major, minor = MIN_CAPABILITY
    assert f"SM {major}{minor}" in gpu[0]


def test_comparison_has_a_cell_for_each_engine():
    policies = {row[0]: row[1] for row in rows("Comparison with other engines")}
    assert policies["scheduling policies"].startswith(f"{len(SCHEDULING_POLICIES)},")
    assert all(len(row) == 5 and all(row) for row in rows("Comparison with other engines"))


def test_python_of_the_front_page_is_three_lines_and_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    lines = [line for line in code.splitlines() if line]
    assert len(lines) == 3
    exec("\n".join(lines), {})


def test_the_site_lists_every_page():
    """Turns red when a page is written and not listed in mkdocs.yml."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def files(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        if isinstance(entry, dict):
            return [name for value in entry.values() for name in files(value)]
        assert isinstance(entry, list)
        return [name for item in entry for name in files(item)]

    docs = ROOT / "docs"
    pages = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    assert sorted(files(site["nav"])) == pages


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_installation_says_what_torch_costs(page: str) -> None:
    """Turns red when the link to builds for CPUs goes, or an index is written down."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "https://pytorch.org/get-started/locally/" in text and "gigabytes" in text
    assert "download.pytorch" not in text
