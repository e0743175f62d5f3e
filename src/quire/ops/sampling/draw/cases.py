"""Draws with every filter and none, from small and large vocabularies, sharp and flat, with ties,
bans and rows that are no numbers, parameters in order or by slot, with masks and without."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import normal

__all__ = ["make_inputs"]

# temperature, top_k, top_p, min_p. top_p is an odd number. Where tokens tie, a round one can equal
# a sum of masses but for rounding.
_FILTERS = (
    (0.7, 0, 1.0, 0.0),
    (1.3, 7, 1.0, 0.0),
    (1.0, 0, 0.90037, 0.0),
    (0.9, 0, 1.0, 0.037),
    (0.8, 20, 0.95037, 0.0),
    (1e-6, 50, 0.50037, 0.1),
    (50.0, 100_000, 0.99037, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5),
)


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    count = len(_FILTERS)
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*_FILTERS, strict=True)
    )
    filters = (temperature, top_k.long(), top_p, min_p)
    for vocab_size, scale in ((1, 1.0), (5, 0.0), (90, 6.0), (1003, 1.0), (17_001, 3.0)):
        for dtype in (torch.float32, torch.bfloat16):
            logits = normal(generator, 4, vocab_size) * scale
            logits[1] = logits[1].round()
            logits[2, 1::3] = -torch.inf
            logits[3, vocab_size // 2] = (torch.nan, torch.inf, -torch.inf)[vocab_size % 3]
            by_slot = dtype == torch.bfloat16
            slots = torch.randperm(count, generator=generator) if by_slot else None
            masks = {} if by_slot else _masks(generator, count, vocab_size)
            yield Case(
                label=f"{vocab_size} tokens, scale {scale}, {dtype}",
                args=(
                    logits.to(dtype),
                    torch.randint(4, (count,), generator=generator),
                    *filters,
                    torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
                    torch.arange(count),
                    torch.randint(2**31, (count,), generator=generator),
                    slots,
                ),
                kwargs=masks,
            )


def _masks(generator: torch.Generator, count: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Masks that allow about half of the tokens, few of them, and none."""
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator)
    bits[1] &= bits[1] >> 3 & bits[1] >> 7 & bits[1] >> 11
    bits[2] = 0
    rows = torch.randint(-1, 3, (count,), generator=generator)
    return {"masks": bits.to(torch.int32), "mask_rows": rows}
