"""Choice of experts in torch."""

from __future__ import annotations

import torch

from quire.config.model_spec import Routing
from quire.ops.moe.route.contract import LEAST_SUM, check_arguments

__all__ = ["route"]


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as in the contract (`quire.ops.moe.route`)."""
    check_arguments(logits, routing, bias, factors)
    mixes = routing.score == "mixer"
    ids, weights = _mixed(logits, routing) if mixes else _best(logits, routing, bias)
    weights = torch.where(logits.isnan().any(dim=-1, keepdim=True), torch.nan, weights)
    weights = weights * routing.scale
    if factors is not None:
        weights = weights * factors[ids]
    return ids.to(torch.int32), weights


def _best(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts with the largest scores."""
    softmax = routing.score == "softmax"
    scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        grouped = choice.unflatten(-1, (routing.num_groups, -1))
        best = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)
        open_groups = _largest(best, routing.top_groups)
        closed = torch.ones_like(best, dtype=torch.bool).scatter(1, open_groups, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = _largest(choice, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + (0.0 if softmax else LEAST_SUM))
    return ids, weights


def _mixed(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose two experts, one after the other."""
    left, ids, weights = logits, list[torch.Tensor](), list[torch.Tensor]()
    for _ in range(2):
        index = _largest(left, 1)
        best = left.gather(1, index)
        gap = (best - logits) / torch.maximum(logits.abs(), best)
        near = left.masked_fill(gap > 2 * routing.jitter, -torch.inf)
        weights.append(near.softmax(dim=-1).gather(1, index))
        ids.append(index)
        left = left.scatter(1, index, -torch.inf)
    return torch.cat(ids, dim=1), torch.cat(weights, dim=1)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest of each row, largest first; ties go to the smaller
    index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
