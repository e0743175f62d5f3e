"""Outputs of linear layers wait for their neighbours: every one in its place, for any number of
rows, panels and threads.

On AMD's processors nothing waits here; test_tiles.py has layers by emulated tile registers, whose
outputs wait on all.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.test_linear_gated import INT4, INT8, LINEAR, arguments_of, assert_same_bits
from tests.pairs import BY_PAIRS
from tests.profiles import examples

from quire.base.platform import detect_platform
from quire.ops import Op, Provider, Team
from quire.ops.pointwise.activation.contract import NAMES
from quire.ops.random_tensors import normal

PLATFORM = detect_platform()
TEAMS = [Team(1), Team(2), Team(5)]
GATES = [None, *sorted(NAMES)]


def compiled(op: Op) -> list[Provider]:
    return [p for p in op.providers if "gate" not in p.lacks and p.unavailable(PLATFORM) is None]


def check_places(
    op: Op, rows: int, outputs: int, depth: int, gate: str | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    """All rows at once give what two at a time do."""
    generator = torch.Generator().manual_seed(rows * outputs)
    arguments = arguments_of(op, generator, outputs, depth, dtype=torch.bfloat16)
    x, other = normal(generator, 2 * rows, depth).to(dtypes[0]).split(rows)
    for provider in compiled(op):
        options = {"gate": gate} if gate else {}
        few = provider.load()(*arguments, **options)
        expected = torch.cat([few(part, dtypes[1]) for part in x.split(2)])
        for team in TEAMS:
            matrix = provider.load(team)(*arguments, **options)
            matrix(other, dtypes[1])  # what is left in memory that is not written
            got = matrix(x, dtypes[1])
            assert_same_bits(got, expected, f"{provider.name}, {team.num_threads} threads")


@examples(12)
@given(
    op=st.sampled_from([LINEAR, INT8, INT4]),
    rows=st.integers(500, 2100),
    columns=st.integers(1, 170),
    gate=st.sampled_from(GATES),
    y_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_more_rows_than_may_wait_at_once(
    op: Op, rows: int, columns: int, gate: str | None, y_dtype: torch.dtype
) -> None:
    """Little depth, so that caches alone would hold all of them. Turns red when a block has more
    rows than there is room for."""
    check_places(op, rows, 2 * columns, 32, gate, (torch.bfloat16, y_dtype))


@pytest.mark.parametrize("rows", [1023, 1024, 1025, 2047, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_of_nearly_as_many_rows_as_may_wait(rows: int, dtype: torch.dtype) -> None:
    """Turns red when the rows of a block are rounded up beyond their room."""
    for op in (LINEAR, INT8, INT4):
        check_places(op, rows, 70, 32, None, (dtype, dtype))


@BY_PAIRS
@pytest.mark.parametrize("op", [LINEAR, INT8, INT4], ids=lambda op: op.name)
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("outputs", [2048 + 64, 2048 + 6])
def test_outputs_of_large_layers(op: Op, gate: str | None, outputs: int) -> None:
    """Weights so large that outputs go past the caches, where rows are whole lines, and others.
    Turns red when some are lost on the way, or stored where others belong."""
    for rows in (3, 5, 33):
        check_places(op, rows, outputs, 1024, gate, (torch.bfloat16, torch.bfloat16))
    check_places(op, 3, outputs, 1024, gate, (torch.bfloat16, torch.float32))


def test_the_layers_are_compiled() -> None:
    """Turns red when the tests above compare nothing."""
    assert all(compiled(op) for op in (LINEAR, INT8, INT4))
