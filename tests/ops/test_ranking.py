"""The best tokens of rows: in one pass over many, and exact about ties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from quire.ops.sampling.draw.ranking import best_ids, best_ids_of_rows


def by_sorting(row: np.ndarray, k: int) -> list[int]:
    order = sorted(range(row.size), key=lambda token: (-float(row[token]), token))
    return order[:k]


@examples(200)
@given(
    vocab_size=st.one_of(st.integers(1, 300), st.integers(1000, 3000)),
    k=st.integers(0, 12),
    levels=st.sampled_from([1, 3, 50, 100_000]),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 1000),
)
def test_equals_sorting(vocab_size: int, k: int, levels: int, banned: float, seed: int) -> None:
    """With few levels most tokens are equal; with bans most are -inf. Sizes on both sides of the
    one from which rows are folded, most of them no multiple of the fold."""
    rng = np.random.default_rng(seed)
    logits = ((rng.integers(0, levels, (4, vocab_size)) - levels // 2) / 8).astype(np.float32)
    logits[rng.random(logits.shape) < banned] = -np.inf
    logits[rng.random(logits.shape) < 0.1] *= -1  # -0.0 and +0.0 are equal, and here is +inf too
    rows = np.array([2, 0, 2])
    found = best_ids_of_rows(logits, rows, k)
    expected = [by_sorting(logits[row], k) for row in rows.tolist()]
    assert found.shape == (3, min(k, vocab_size))
    assert found.tolist() == expected
    assert best_ids(logits[1], k).tolist() == by_sorting(logits[1], k)


@pytest.mark.parametrize("vocab_size", [40, 4096])
def test_no_rows(vocab_size: int) -> None:
    logits = np.zeros((2, vocab_size), np.float32)
    assert best_ids_of_rows(logits, np.zeros(0, np.int64), 5).shape == (0, 5)
