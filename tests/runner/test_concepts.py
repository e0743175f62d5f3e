"""The list of concepts in docs/design/runner.md is the list of the classes in
`quire.compute.runner`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.compute.runner.kernel_rows import KernelRows
from quire.compute.runner.rows import KERNEL_COLUMNS, RowTable
from quire.protocol.step import EnterRow, MediaSpan, StepPlan

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "src" / "quire" / "compute" / "runner"
VARIANTS = re.compile(r"^(Host|Device|Cuda|Gpu|Cpu|Native|Captured|Uniform|Eager)(?=[A-Z])")


def table(heading: str) -> list[tuple[str, str, str]]:
    """Rows of the table whose first column has this heading, without backquotes."""
    text = (ROOT / "docs" / "design" / "runner.md").read_text()
    _, _, rest = text.partition(f"| {heading} | class | file |\n")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return [(row[0], row[1], row[2]) for row in rows]


CONCEPTS, IMPLEMENTATIONS = table("concept"), table("protocol")


def classes() -> dict[str, tuple[str, bool]]:
    """File of each public class in the room, and whether it is a protocol."""
    found: dict[str, tuple[str, bool]] = {}
    for path in sorted(RUNNER.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in found, f"two classes are called {node.name}"
                bases = {ast.unparse(base) for base in node.bases}
                found[node.name] = (str(path.relative_to(RUNNER)), "Protocol" in bases)
    return found


def test_every_class_stands_for_one_concept() -> None:
    """Turns red when a concept gets a second class, or the list is out of date."""
    assert len(CONCEPTS) > 30, "the table was not found"
    concepts = [concept for concept, _, _ in CONCEPTS]
    assert len(set(concepts)) == len(concepts)
    listed = {name: file for _, name, file in (*CONCEPTS, *IMPLEMENTATIONS)}
    assert len(listed) == len(CONCEPTS) + len(IMPLEMENTATIONS), "a class is listed twice"
    assert listed == {name: file for name, (file, _) in classes().items()}


def test_only_protocols_have_implementations() -> None:
    found, concepts = classes(), {name for _, name, _ in CONCEPTS}
    for protocol, name, _ in IMPLEMENTATIONS:
        assert protocol in concepts
        assert found[protocol][1], f"{protocol} is no Protocol, so {name} is a second class"


def test_no_class_is_a_variant_of_another() -> None:
    """A name that another one has behind `Host`, `Device` or the like is one concept twice."""
    stems: dict[str, str] = {}
    for _, name, _ in CONCEPTS:
        stem = VARIANTS.sub("", name)
        assert stem not in stems, f"{name} and {stems[stem]}"
        stems[stem] = name


@pytest.mark.parametrize("name", KERNEL_COLUMNS)
def test_a_column_that_kernels_read_is_the_rows_own_and_is_forked(name: str) -> None:
    rows = RowTable(3, 16, [4], position_axes=3)
    column = getattr(KernelRows.of_host(rows), name)
    enter = EnterRow(
        1, np.arange(5, dtype=np.int32), 4, 3, (np.zeros(4, np.int32),), None, 0, 0,  # type: ignore[arg-type]
        adapter=7,
        media=(MediaSpan(0, 3, 0, np.zeros(9, np.int32)),),
    )  # fmt: skip
    rows.apply(StepPlan(0, enter=(enter,)))
    assert column[1] == getattr(rows, name)[1] != 0
    rows.fork(1, 2)
    assert column[2] == column[1]
    assert column.dtype == torch.int64


def test_the_states_of_rows_change_places_when_their_step_commits() -> None:
    """Each row has two places of its own. A step that is computed again reads what it read before,
    and a fork keeps its places."""
    rows = RowTable(3, 16, [4], has_states=True)
    prompt = np.arange(5, dtype=np.int32)
    enter = [
        EnterRow(slot, prompt, 5, 0, (np.zeros(4, np.int32),), None, 0, 0)  # type: ignore[arg-type]
        for slot in (0, 1)
    ]
    delta = {"delta_slot": np.array([0], np.int32), "delta_tokens": np.array([2], np.int32)}
    rows.apply(StepPlan(0, enter=tuple(enter), **delta))
    read, write = rows.read_state.copy(), rows.write_state.copy()
    assert len({*read.tolist(), *write.tolist()}) == 6
    scheduled = rows.scheduled()
    assert rows.read_state.tolist() == read.tolist()
    rows.commit_computed(scheduled)
    assert rows.read_state.tolist() == [write[0], read[1], read[2]]
    assert rows.write_state.tolist() == [read[0], write[1], write[2]]
    rows.fork(0, 2)
    assert (rows.read_state[2], rows.write_state[2]) == (read[2], write[2])
