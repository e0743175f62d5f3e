"""The workload of the PagedAttention paper's section 6.4: English to German, all prompts with one
prefix of an instruction and examples; 80 tokens with one example, 341 with five.

The paper names the data set (WMT16) and no lengths. newstest2016 has about 21 words per English
sentence and 20 per German one; LLaMA's tokenizer makes about 1.35 and 2.1 tokens of such a word.
Tokens are random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PREFIX_TOKENS", "Translations", "draw_translations", "make_prefix"]

PREFIX_TOKENS = (80, 341)
SENTENCE_TOKENS, SIGMA = 29, 0.5  # log-normal; the spread is our choice
GERMAN_PER_ENGLISH, RATIO_SIGMA = 1.45, 0.15  # log-normal too

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Translations:
    """sentences: int32 token ids, by request. output_lengths: tokens."""

    sentences: list[Tokens]
    output_lengths: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)

    def prompts(self, prefix: Tokens) -> list[Tokens]:
        """Each sentence behind the prefix."""
        return [np.concatenate((prefix, sentence)) for sentence in self.sentences]

    def describe(self) -> dict[str, float]:
        """Means, for the record of a measurement."""
        return {
            "requests": len(self.sentences),
            "mean_sentence_tokens": round(float(np.mean([len(s) for s in self.sentences])), 1),
            "mean_output_tokens": round(float(np.mean(self.output_lengths)), 1),
        }


def make_prefix(num_tokens: int, vocab_size: int) -> Tokens:
    """The same one for every seed of the sentences."""
    rng = np.random.default_rng(num_tokens)
    return rng.integers(3, vocab_size, num_tokens).astype(np.int32)


def draw_translations(count: int, vocab_size: int, seed: int) -> Translations:
    rng = np.random.default_rng(seed)
    english = _log_normal(rng, SENTENCE_TOKENS, SIGMA, count)
    german = english * _log_normal(rng, GERMAN_PER_ENGLISH, RATIO_SIGMA, count)
    lengths = np.maximum(np.rint(english), 2).astype(int)
    sentences = [rng.integers(3, vocab_size, n).astype(np.int32) for n in lengths]
    return Translations(sentences, np.maximum(np.rint(german), 1).astype(int).tolist())


def _log_normal(
    rng: np.random.Generator, mean: float, sigma: float, count: int
) -> npt.NDArray[np.float64]:
    return rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
