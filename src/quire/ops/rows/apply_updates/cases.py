"""No update, one, repeated equal ones, and more than one program handles."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case

__all__ = ["make_inputs"]

NUM_WORDS = 5000


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for count in (0, 1, 7, 3000):
        indices = torch.randperm(NUM_WORDS, generator=generator)[:count].to(torch.int32)
        values = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator)
        again = slice(0, count // 3)
        yield Case(
            label=f"{count} updates and {count // 3} of them again",
            args=(
                torch.arange(NUM_WORDS, dtype=torch.int32),
                torch.cat((indices, indices[again])),
                torch.cat((values, values[again])).to(torch.int32),
            ),
        )
