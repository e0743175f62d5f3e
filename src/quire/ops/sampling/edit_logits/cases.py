"""Each edit alone, all together and none, over short and long histories, at the vocabulary's
ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]

NUM_SLOTS = 7

# repetition, presence, frequency
_PENALTIES = (
    (1.0, 0.0, 0.0),
    (1.3, 0.0, 0.0),
    (0.7, 0.5, -0.25),
    (1.0, 0.0, 1.7),
    (1.0, -1.5, 0.0),
    (1.2, 0.3, 0.1),
)


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for vocab_size, length in ((9, 12), (130, 40), (4099, 2100)):
            yield _case(generator, dtype, vocab_size, length)


def _case(generator: torch.Generator, dtype: torch.dtype, vocab_size: int, length: int) -> Case:
    count = len(_PENALTIES)
    # the history has ids that are no tokens: placeholders of media
    tokens = torch.randint(-1, vocab_size + 2, (NUM_SLOTS, length), generator=generator)
    num_tokens = torch.randint(1, length + 1, (NUM_SLOTS,), generator=generator)
    num_tokens[0], num_tokens[1] = 1, length
    num_prompt = (num_tokens * torch.rand(NUM_SLOTS, generator=generator)).long().clamp(min=1)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:count]
    last = vocab_size - 1
    bias_ids: list[list[int]] = [
        [],
        [0, last],
        [],
        list(range(0, vocab_size, 2))[:300],
        [last],
        [1],
    ]
    allowed: list[list[int]] = [[], [], [0, last, last // 2], [], list(range(vocab_size)), []]
    words: list[int] = []
    bans: list[list[tuple[int, int, int, int]]] = []
    for index, slot in enumerate(slots.tolist()):
        output = tokens[slot, num_prompt[slot] : num_tokens[slot]].tolist()
        of_row: list[tuple[int, int, int, int]] = []
        if index % 2:
            of_row += [(token, len(output) + token % 2, 0, -1) for token in (0, 3, 6, last)]
        for size in range(min(3, len(output)) if index > 1 else 0):
            # a word that the output ends with, one that it does not end with, one that is longer
            end = output[len(output) - size :]
            for token, word in ((5, end), (7, [*end[1:], -5]), (2, [*output, 0])):
                of_row.append((token, 0, len(words), len(word)))
                words += word
        bans.append(of_row)
    biases = sum(len(ids) for ids in bias_ids)
    return Case(
        label=f"{dtype}, {vocab_size} tokens, histories of {length}",
        args=(
            normal(generator, count + 1, vocab_size, dtype=dtype) * 3,
            torch.randint(count + 1, (count,), generator=generator),
            slots,
            tokens.to(torch.int32),
            num_prompt,
            num_tokens,
            torch.tensor(_PENALTIES, dtype=torch.float64),
            _starts(bias_ids),
            torch.tensor([*chain(*bias_ids)], dtype=torch.int32),
            normal(generator, biases),
            _starts(allowed),
            torch.tensor([*chain(*allowed)], dtype=torch.int32),
            _starts(bans),
            torch.tensor([*chain(*bans)], dtype=torch.int32).view(-1, 4),
            torch.tensor(words, dtype=torch.int32),
        ),
    )


def _starts(lists: Sequence[Sequence[object]]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(len(each) for each in lists)], dtype=torch.int32)
