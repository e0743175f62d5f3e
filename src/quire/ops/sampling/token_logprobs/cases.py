"""Sharp and flat rows, ties, bans, k from none to more than there are tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for vocab_size, k, scale in (
            (1, 2, 1.0),
            (70, 0, 3.0),
            (900, 5, 1.0),
            (4097, 20, 9.0),
            (17_001, 1000, 6.0),
            (2500, 1024, 0.01),
        ):
            logits = normal(generator, 4, vocab_size) * scale
            logits[1] = logits[1].round()
            logits[2, ::2] = -torch.inf
            logits[2, vocab_size - 1] = 12.5
            logits[3, 0] = 90.0  # everything else is far down
            rows = torch.randperm(4, generator=generator)
            token_ids = torch.randint(vocab_size, (4,), generator=generator)
            token_ids[rows == 2] = vocab_size - 1
            yield Case(
                label=f"{dtype}, {k} of {vocab_size} tokens, scale {scale}",
                args=(logits.to(dtype), rows, token_ids.to(torch.int32), k),
            )
