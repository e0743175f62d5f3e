"""Row after row, by torch."""

from __future__ import annotations

import torch

from quire.base.errors import EngineError

__all__ = ["keep_tokens"]


def keep_tokens(
    x: torch.Tensor,
    kept: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    keep: torch.Tensor,
) -> None:
    """Shapes as in the contract (`quire.ops.recurrent.keep_tokens`)."""
    for row, slot in enumerate(slots.tolist()):
        first, start, end = int(keep[slot]), int(starts[row]), int(starts[row + 1])
        if first < 0:
            continue
        if first + end - start > len(kept):
            raise EngineError(
                f"slot {slot} keeps {end - start} tokens from place {first} of {len(kept)} on"
            )
        kept[first : first + end - start] = x[start:end]
