"""Applies the masks of a draw to rows of logits beforehand, for kernels that cannot read masks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError

__all__ = ["check_masks", "with_masks"]

_BROKEN, _BANNED = -1, -2

Draw = Callable[..., torch.Tensor]


def with_masks(draw: Draw) -> Draw:
    """The operation `quire.ops.sampling.draw` by an implementation that takes no masks."""

    def masked(
        logits: torch.Tensor,
        rows: torch.Tensor,
        *columns: torch.Tensor | None,
        masks: torch.Tensor | None = None,
        mask_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if masks is None or mask_rows is None:
            return draw(logits, rows, *columns)
        check_masks(masks, logits.shape[1])
        table = logits[rows]
        is_broken = ~table.amax(dim=1).isfinite()
        allowed = (mask_rows < 0)[:, None] | _bits(masks, mask_rows, table.shape[1])
        edited = table.masked_fill(~allowed, -torch.inf)
        token_ids = draw(edited, torch.arange(len(rows), device=rows.device), *columns)
        found = torch.where(token_ids < 0, _BANNED, token_ids)
        return torch.where(is_broken, _BROKEN, found).to(torch.int32)

    return masked


def check_masks(masks: torch.Tensor, vocab_size: int) -> None:
    """Raise EngineError unless masks are as wide as `vocab_size` tokens need."""
    words = -(-vocab_size // 32)
    if masks.shape[1] != words:
        raise EngineError(
            f"masks have {masks.shape[1]} words, but {vocab_size} tokens need {words}: make them "
            "for the model's vocabulary"
        )


def _bits(masks: torch.Tensor, mask_rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the tokens that masks allow, bool [R, V]; rows without a mask get those of another."""
    words = masks[mask_rows.clamp(min=0)]
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (words[:, :, None] >> bits & 1).flatten(1)[:, :vocab_size].bool()
