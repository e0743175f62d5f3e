"""Drawing in Triton's interpreter: random laws and filters, and rows whatever is beside them.

Started by tests/ops/test_triton.py, as interpreted_providers.py is.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.ops.triton.interpreter import repair_interpreter
from tests.profiles import SCALE

from quire.ops import ALL_OPS
from quire.ops.sampling.draw.noise import gumbel, token_bits
from quire.ops.sampling.draw.triton import draw

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, over NaN and inf
Arguments = tuple[torch.Tensor, ...]


def random_draws(seed: int, vocab_size: int, count: int) -> Arguments:
    """Half of the rows with ties or bans; every filter on and off, alone and together."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.0, 0.1, 1.0, 6.0, 60.0], (count, 1))
    logits = rng.standard_normal((count, vocab_size)) * scale
    logits[::2] = logits[::2].round()
    logits[1::3, 1::4] = -np.inf
    columns = (
        rng.choice([0.0, 1e-6, 0.01, 0.5, 1.0, 3.0, 1e30], count),
        rng.choice([0, 0, 1, 2, 50, 1500], count),
        rng.choice([1.0, 1.0, 0.00037, 0.3003, 0.90037, 0.99937], count),
        rng.choice([0.0, 0.0, 0.037, 1.0], count),
        rng.integers(-(2**63), 2**63 - 1, count),
        rng.integers(4, size=count),
        rng.integers(2**31, size=count),
    )
    rows = torch.from_numpy(rng.integers(count, size=count))
    return torch.from_numpy(logits.astype(np.float32)), rows, *map(torch.from_numpy, columns)


@pytest.mark.parametrize("vocab_size", [2, 300, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_draw_equals_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    """Turns red when a filter ends at another token, or a winner is passed over. Seeds under which
    no two scores of these draws are within float32's error of each other."""
    for seed in range(2 if SCALE > 1 else 1):
        logits, *rest = random_draws(seed, vocab_size, 24)
        logits = logits.to(dtype)
        expected = ALL_OPS["draw"].reference(logits, *rest)
        assert draw(logits, *rest).tolist() == expected.tolist()


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    """Turns red when a result depends on another row or on its place; with a stride as well."""
    logits, rows, *columns = random_draws(5, 4200, 6)
    together = draw(logits, rows, *columns).tolist()
    wide = torch.full((6, 4300), torch.nan)
    wide[:, :4200] = logits
    for index in range(6):
        row = [column[index : index + 1] for column in columns]
        assert draw(wide[:, :4200], rows[index : index + 1], *row).tolist() == [together[index]]


def test_the_noise_is_that_of_the_formula() -> None:
    """Turns red when float32 noise is off by more than 4e-6, judged by the margins of the winners
    of flat laws over 20,000 tokens."""
    count, vocab_size = 6, 20_000
    seeds = torch.arange(count) * 2**61
    zeros = torch.zeros(count, dtype=torch.int64)
    off = torch.zeros(count, dtype=torch.float64)
    logits = torch.zeros(1, vocab_size)
    drawn = draw(logits, zeros, off + 1.0, zeros, off + 1.0, off, seeds, zeros, zeros)
    bits = token_bits(
        seeds[:, None], zeros[:, None], zeros[:, None], torch.arange(vocab_size)[None]
    )
    noise = gumbel(bits)
    won = noise.gather(1, drawn.long()[:, None])[:, 0]
    assert (noise.amax(dim=1) - won < 8e-6).all()
