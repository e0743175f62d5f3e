"""The workload of the PagedAttention paper's section 6.4: English to German, all prompts with one
prefix of an instruction and examples; 80 tokens with one example, 341 with five.

The paper names the data set (WMT16) and no lengths. newstest2016 has about 21 words per English
sentence and 20 per German one; LLaMA's tokenizer makes about 1.35 and 2.1 tokens of such a word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.entrypoints.simulator.workloads.trace import Piece, TraceRequest, poisson_times

__all__ = ["PREFIX_TOKENS", "draw_sentences", "draw_translation"]

PREFIX_TOKENS = (80, 341)
SENTENCE_TOKENS, SIGMA = 29, 0.5  # log-normal; the spread is our choice
GERMAN_PER_ENGLISH, RATIO_SIGMA = 1.45, 0.15  # log-normal too

Ints = npt.NDArray[np.int64]


def draw_sentences(rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    """Return tokens of English sentences and of their translations, int64 [count] each."""
    english = _log_normal(rng, SENTENCE_TOKENS, SIGMA, count)
    german = english * _log_normal(rng, GERMAN_PER_ENGLISH, RATIO_SIGMA, count)
    return _whole(english, 2), _whole(german, 1)


def draw_translation(
    prefix_tokens: int, *, rate: float, seconds: float, seed: int
) -> list[TraceRequest]:
    """Draw requests that all begin with the same prefix."""
    rng = np.random.default_rng([seed, 3])
    times = poisson_times(rng, rate, seconds)
    english, german = draw_sentences(rng, len(times))
    prefix = (Piece(prefix_tokens, prefix_tokens),)
    return [
        TraceRequest(at_s, prefix_tokens + source, target, prefix)
        for at_s, source, target in zip(times, english.tolist(), german.tolist(), strict=True)
    ]


def _whole(values: npt.NDArray[np.float64], smallest: int) -> Ints:
    return np.maximum(np.rint(values), smallest).astype(np.int64)


def _log_normal(
    rng: np.random.Generator, mean: float, sigma: float, count: int
) -> npt.NDArray[np.float64]:
    return rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
