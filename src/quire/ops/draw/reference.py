"""Draws row by row, by the definition."""

from __future__ import annotations

import numpy as np
import torch

from quire.ops.draw.candidates import select_candidates
from quire.ops.draw.noise import gumbel, token_bits

__all__ = ["draw"]


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    sample_indices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    token_ids = torch.empty(len(rows), dtype=torch.int64)
    table = logits.numpy()
    filters = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    streams = zip(seeds.numpy(), sample_indices.numpy(), positions.numpy(), strict=True)
    for i, (row, keep, stream) in enumerate(zip(rows.tolist(), filters, streams, strict=True)):
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            candidates = select_candidates(table[row], *keep)
        scores = candidates.z + gumbel(token_bits(*stream, candidates.token_ids))
        ties = candidates.token_ids[scores == scores.max()]
        token_ids[i] = int(ties.min())
    return token_ids
