"""Batches of token rows: library text beside packed dialogues, a pure function of seed and step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from corpus import Corpus
from dialogues import BOS, EOS, make_dialogue, make_drill, render
from numpy.typing import NDArray
from tokenizers import Tokenizer

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]

DRILL_SHARE = 0.35  # of the dialogues, once drills have begun
PROMPT_WEIGHT = 0.1  # of dialogue tokens that the model does not write itself


@dataclass(frozen=True)
class Batch:
    """Inputs, targets (both [N, T] ids) and the weight of every target in the loss."""

    inputs: Ids
    targets: Ids
    weights: Weights


class CorpusRows:
    """Windows over the library text: each epoch visits all of it once, in an order of its own."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
        texts = [document.text for document in corpus.train]
        random.Random(seed).shuffle(texts)
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            ids += [bos, *encoding.ids, eos]
        self.ids = np.array(ids, dtype=np.uint16)
        self._seed = seed
        self._epoch = -1
        self._starts: list[int] = []
        self._length = 0

    def next_start(self, length: int) -> int:
        """Return the start of the next window of `length` inputs and one more target."""
        if length != self._length or not self._starts:
            self._epoch += 1
            rng = np.random.default_rng([self._seed, self._epoch])
            first = int(rng.integers(0, length))
            starts = np.arange(first, len(self.ids) - length - 1, length)
            self._starts = list(rng.permutation(starts))
            self._length = length
        return int(self._starts.pop())


class DialogueRows:
    """Rows filled with dialogues; the last one of a row is cut at the end of the row."""

    def __init__(
        self, tokenizer: Tokenizer, seed: int, tool_share: float, drills_from: int
    ) -> None:
        self._drills_from = drills_from
        self._tokenizer = tokenizer
        self._seed = seed
        self._tool_share = tool_share

    def row(self, step: int, index: int, length: int) -> tuple[Ids, Weights]:
        """`length` + 1 ids and as many weights."""
        rng = random.Random(f"{self._seed}/{step}/{index}")
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) <= length:
            if step >= self._drills_from and rng.random() < DRILL_SHARE:
                dialogue = make_drill(rng)
            else:
                dialogue = make_dialogue(rng, False, rng.random() < self._tool_share)
            pieces = render(dialogue)
            encoded = self._tokenizer.encode_batch(
                [text for text, _ in pieces], add_special_tokens=False
            )
            for (_, own), encoding in zip(pieces, encoded, strict=True):
                ids += encoding.ids
                weights += [1.0 if own else PROMPT_WEIGHT] * len(encoding.ids)
        return np.array(ids[: length + 1]), np.array(weights[: length + 1], dtype=np.float32)


@dataclass(frozen=True)
class Mix:
    """Number of tokens of a step, and the share of dialogues among its rows, early and late."""

    tokens_per_step: int
    early_share: float
    late_share: float
    late_from: int

    def rows(self, length: int) -> int:
        """Rows of a step: an even number, so that two processes can share them."""
        return 2 * round(self.tokens_per_step / length / 2)

    def dialogue_rows(self, step: int, length: int) -> int:
        """Dialogue rows of this step; fractions add up over the steps."""
        early = step < self.late_from
        share = (self.early_share if early else self.late_share) * self.rows(length)
        return int((step + 1) * share) - int(step * share)


def make_batch(
    library: CorpusRows, dialogues: DialogueRows, mix: Mix, step: int, length: int
) -> Batch:
    """The batch of one step; `library` must have been asked for all the steps before."""
    talk = mix.dialogue_rows(step, length)
    rows = [dialogues.row(step, index, length) for index in range(talk)]
    for _ in range(mix.rows(length) - talk):
        start = library.next_start(length)
        window = library.ids[start : start + length + 1].astype(np.int64)
        rows.append((window, np.ones(length + 1, dtype=np.float32)))
    ids = np.stack([row for row, _ in rows])
    weights = np.stack([weight for _, weight in rows])
    return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:])
