"""Prompts of the workload of translations (`quire.entrypoints.simulator.workloads.translation`) as
token ids, which are random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.entrypoints.simulator.workloads.translation import PREFIX_TOKENS, draw_sentences

__all__ = ["PREFIX_TOKENS", "Translations", "draw_translations", "make_prefix"]

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
    lengths, german = draw_sentences(rng, count)
    sentences = [rng.integers(3, vocab_size, n).astype(np.int32) for n in lengths]
    return Translations(sentences, german.tolist())
