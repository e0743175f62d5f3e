"""Workloads: named by parameters and seed, and always within the context."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import ConfigError
from quire.entrypoints.bench.lengths import (
    DATASETS,
    LengthRange,
    LogNormal,
    draw_workload,
    parse_lengths,
    random_prompts,
)
from quire.entrypoints.bench.record import percentile, spread_of


def test_lengths_as_text() -> None:
    assert parse_lengths("64") == LengthRange(64, 64)
    assert parse_lengths("100-1024") == LengthRange(100, 1024)
    for text in ("", "0", "9-3", "a-b", "5-", "-5", "1.5"):
        with pytest.raises(ConfigError, match="Give 64 or 100-1024"):
            parse_lengths(text)


@pytest.mark.parametrize("name", DATASETS)
def test_data_sets_have_the_means_of_the_paper(name: str) -> None:
    """A log-normal with mu = ln(mean) has a larger mean than was meant."""
    for lengths in DATASETS[name]:
        drawn = lengths.draw(np.random.default_rng(0), 200_000)
        assert abs(drawn.mean() / lengths.mean - 1) < 0.03
        assert drawn.min() >= 1


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 50),
    context=st.integers(2, 600),
    cut=st.one_of(st.none(), st.integers(1, 100)),
)
def test_a_workload_fits_the_context(seed: int, count: int, context: int, cut: int | None) -> None:
    """A request that is refused would make a benchmark faster."""
    work = draw_workload(LogNormal(161.0, 1.0), LogNormal(338.0, 0.9), count, seed, context, cut)
    assert len(work.prompt_lengths) == len(work.output_lengths) == count
    for prompt, output in zip(work.prompt_lengths, work.output_lengths, strict=True):
        assert prompt >= 1
        assert 1 <= output <= (cut or context)
        assert prompt + output <= context


def test_fixed_lengths_that_do_not_fit_together_are_refused() -> None:
    """Cutting what the user fixed would measure something else."""
    with pytest.raises(ConfigError, match="do not fit max_model_len=100"):
        draw_workload(LengthRange(60, 60), LengthRange(10, 60), 1, 0, 100)


def test_same_seed_same_workload_and_prompts() -> None:
    """A figure can be repeated only if its workload can."""
    arguments = (*DATASETS["sharegpt"], 20)
    assert draw_workload(*arguments, 3, 2048) == draw_workload(*arguments, 3, 2048)
    assert draw_workload(*arguments, 3, 2048) != draw_workload(*arguments, 4, 2048)
    assert random_prompts([3, 5], 100, 7) == random_prompts([3, 5], 100, 7)
    assert random_prompts([3, 5], 100, 7) != random_prompts([3, 5], 100, 8)
    assert all(0 <= token < 11 for prompt in random_prompts([500], 11, 0) for token in prompt)


def test_spread_and_percentiles() -> None:
    spread = spread_of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.low, spread.high) == (2.5, 1.0, 10.0)
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([5.0], 99) == 5.0
    values = np.random.default_rng(1).random(37).tolist()
    for percent in (0, 10, 33, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
