"""Noise is the right bits, the right law, and independent in every direction."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quire.compute.sampling import reference
from quire.ops.sampling.draw.noise import gumbel, token_bits

WORDS = st.integers(0, 2**32 - 1)
ALPHA = 1e-4
"""Seeds are fixed, so a test that passes once passes always; this is for whoever changes them."""


def signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def bits_of(seed: int, sample_index: int, position: int, vocab_size: int) -> np.ndarray:
    where = (torch.tensor([value]) for value in (signed(seed), sample_index, position))
    return token_bits(*where, torch.arange(vocab_size)).numpy()


def uniforms(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.float64) + 0.5) / 2**32


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected):
    """Catches a wrong constant or rotation: the known answers of Random123 for 10 rounds."""
    assert reference.philox4x32(counter, key) == expected


@given(st.integers(0, 2**64 - 1), WORDS, WORDS, st.integers(0, 2**31 - 1))
def test_single_words_equal_the_reference(seed, sample_index, position, token_id):
    """Catches lanes that overflow or keep rubbish in their upper halves."""
    where = (signed(seed), sample_index, position, token_id)
    got = token_bits(*(torch.tensor([value]) for value in where))
    assert int(got[0]) == reference.noise_word(seed, sample_index, position, token_id)
    expected = reference.gumbel_noise(seed, sample_index, position, token_id)
    assert float(gumbel(got)[0]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_noise_is_finite_for_every_extreme_word():
    """Catches log(0): a token that always, or never, wins."""
    noise = gumbel(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])).numpy()
    assert np.isfinite(noise).all()
    assert noise[0] == pytest.approx(-math.log(2**-33), rel=1e-9)
    assert (np.diff(noise) < 0).all()


def test_law_is_gumbel():
    """Catches a biased mixing function or a wrong formula: Kolmogorov-Smirnov on 200 000 words."""
    noise = gumbel(torch.from_numpy(bits_of(12345, 3, 99, 200_000))).numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > ALPHA


@pytest.mark.parametrize("along", ["token", "position", "sample", "seed"])
def test_neighbours_are_independent(along):
    """Catches weak mixing of one argument: chi-square of pairs of neighbours in 32 x 32 cells."""
    size = 100_000
    count = torch.arange(size + 1)
    zeros = torch.zeros_like(count)
    where = {"seed": zeros, "sample": zeros, "position": zeros, "token": zeros} | {along: count}
    bits = token_bits(*where.values()).numpy()
    cells = (uniforms(bits) * 32).astype(np.int64)
    table = np.bincount(cells[:-1] * 32 + cells[1:], minlength=1024)
    assert stats.chisquare(table).pvalue > ALPHA
    assert abs(np.corrcoef(uniforms(bits[:-1]), uniforms(bits[1:]))[0, 1]) < 4 / math.sqrt(size)


def test_whole_draws_do_not_resemble_each_other():
    """Catches streams that are shifted copies: correlation over the vocabulary of near draws."""
    base = (5, 1, 40)
    others = [(6, 1, 40), (5, 2, 40), (5, 1, 41), (1, 5, 40), (5 + 2**32, 1, 40), (40, 1, 5)]
    first = uniforms(bits_of(*base, 50_000))
    for other in others:
        second = uniforms(bits_of(*other, 50_000))
        for shift in range(-4, 5):
            correlation = np.corrcoef(first, np.roll(second, shift))[0, 1]
            assert abs(correlation) < 5 / math.sqrt(50_000), (other, shift)


def test_words_never_repeat_across_draws():
    """Catches a counter that collides: about 2e5**2 / 2**33 = 5 equal pairs come by chance."""
    bits = np.concatenate(
        [bits_of(7, sample, position, 10_000) for sample in range(4) for position in range(5)]
    )
    assert bits.size - np.unique(bits).size < 20
