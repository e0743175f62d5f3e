"""Contract of `route`."""

from __future__ import annotations

import torch

from quire.base.errors import EngineError
from quire.config.model_spec import Routing

__all__ = ["LEAST_SUM", "check_arguments"]

LEAST_SUM = 1e-20
"""Added to the sum of a token's sigmoids before its weights are divided by it."""


def check_arguments(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None,
    factors: torch.Tensor | None,
) -> None:
    """Raise EngineError unless logits are float32 [T, E], bias and factors are float32 [E] exactly
    where `routing` has them, and groups have equal sizes, of as many experts as count in them at
    least; one or two do. A mixer takes two of at least as many."""
    experts = routing.num_experts
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[1] != experts:
        raise EngineError(
            f"route takes float32 logits of {experts} experts, not "
            f"{logits.dtype}{list(logits.shape)}."
        )
    for noun, given, is_wanted in (
        ("a bias", bias, routing.biased),
        ("factors", factors, routing.has_factors),
    ):
        if (given is not None) != is_wanted or (
            given is not None and (given.dtype != torch.float32 or given.shape != (experts,))
        ):
            raise EngineError(
                f"route takes {noun} in float32 of {experts} experts where it has any."
            )
    if routing.score == "mixer" and (routing.top_k != 2 or routing.num_groups != 1):
        raise EngineError(f"route mixes two experts of one group, not {routing.top_k}.")
    size = experts // routing.num_groups
    least = routing.group_best if routing.num_groups > 1 else 1
    if (
        not 0 < routing.top_k <= size * routing.top_groups
        or size * routing.num_groups != experts
        or not 1 <= routing.group_best <= 2
        or size < least
    ):
        raise EngineError(
            f"route cannot choose {routing.top_k} of {experts} experts from {routing.top_groups} "
            f"of {routing.num_groups} groups."
        )
