"""Draws by the definition: whole rows are sorted, and all in float64.

The filters' candidates: with logits l, m = max(l) and z = (l - m) / temperature, the law of a row
is exp(z) over its sum. Tokens are ranked by logit, larger first, equal ones by id. Top-k keeps the
first k. Top-p keeps a token while those ranked before it hold less than top_p of what top-k left
(Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020, section 3.1: the
smallest set whose mass reaches p). Min-p keeps those with exp(z) >= min_p (Nguyen et al., "Turning
Up the Heat", ICLR 2025, section 3).

Nothing is read by the host and no shape depends on data, so this can be recorded like a kernel.
"""

from __future__ import annotations

import torch

from quire.ops.sampling.draw.noise import four_words, gumbel

__all__ = ["draw"]

_NO_TOKEN = -1


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
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.sampling.draw`)."""
    columns = (temperature, top_k, top_p, min_p, seeds, sample_indices)
    if slots is not None:
        columns = tuple(column[slots] for column in columns)
    temperature, top_k, top_p, min_p, seeds, sample_indices = (
        column[:, None] for column in columns
    )
    table = logits[rows]
    # adding 0 turns -0.0 into 0.0, which GPUs sort apart
    ranked, token_ids = table.double().add(0.0).sort(dim=1, descending=True, stable=True)
    best = ranked[:, :1]  # NaN sorts as the largest
    greedy = token_ids[:, 0]
    z = (ranked - best) / torch.where(temperature > 0, temperature, 1.0)
    allowed = _allowed(z, top_k, top_p, min_p) & (ranked > -torch.inf)
    quads = torch.arange(-(-table.shape[1] // 4), device=table.device)
    words = four_words(seeds, sample_indices, positions[:, None], quads[None])
    noise = gumbel(words.flatten(1).gather(1, token_ids))
    scores = torch.where(allowed, z + noise, -torch.inf)
    ties = torch.where(scores == scores.amax(dim=1, keepdim=True), token_ids, table.shape[1])
    drawn = torch.where(temperature[:, 0] > 0, ties.amin(dim=1), greedy)
    return torch.where(best[:, 0].isfinite(), drawn, _NO_TOKEN).to(torch.int32)


def _allowed(
    z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return which tokens [R, V], in their order by rank, the filters leave. The others [R, 1]."""
    rank = torch.arange(z.shape[1], device=z.device)
    within_k = (rank < top_k) | (top_k <= 0)
    weights = torch.where(within_k, z.exp(), 0.0)
    mass = weights.cumsum(dim=1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    within_p = (before < top_p * mass[:, -1:]) | (rank == 0) | (top_p >= 1.0)
    return within_k & within_p & (weights >= min_p)
