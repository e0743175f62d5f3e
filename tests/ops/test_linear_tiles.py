"""Cuts of products for few rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.ops.linear.plain.tiles import candidates, default_tiles, invariant_tiles

SIZES = st.integers(1, 200_000)


@given(rows=st.integers(1, 64), outputs=SIZES, depth=SIZES, processors=st.integers(1, 200))
def test_cuts_cover_the_rows_and_have_no_empty_piece(
    rows: int, outputs: int, depth: int, processors: int
) -> None:
    """Turns red when a piece of a sum would be less than a tile, or a tile less than the rows."""
    cuts = list(candidates(rows, outputs, depth, processors))
    assert len(cuts) == len(set(cuts))
    assert default_tiles(rows, outputs, depth, processors) == cuts[0]
    for tiles in (*cuts, invariant_tiles(outputs, depth)):
        assert tiles.rows >= rows
        assert tiles.pieces == 1 or tiles.pieces * tiles.depth <= depth


def test_a_narrow_matrix_is_cut_so_that_all_processors_read() -> None:
    """Turns red when 1,024 outputs keep 8 of 132 multiprocessors busy."""
    for tiles in candidates(1, 1024, 3072, 132):
        assert 1024 // tiles.columns * tiles.pieces >= 66
    assert default_tiles(1, 151_936, 1024, 132).pieces == 1


def test_the_invariant_cut_does_not_know_the_rows() -> None:
    """Its parameters are the matrix alone; turns red when a narrow matrix is not cut."""
    assert invariant_tiles(1024, 3072).pieces > 1
    assert invariant_tiles(151_936, 1024).pieces == 1
