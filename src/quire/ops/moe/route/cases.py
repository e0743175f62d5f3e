"""Every way of choosing, odd numbers of experts, equal scores, NaN."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.config.model_spec import Routing
from quire.ops.operation import Case
from quire.ops.random_tensors import normal

__all__ = ["make_inputs"]

ROUTINGS = (
    Routing(8, 2),
    Routing(60, 4, renormalise=False),
    Routing(37, 37, scale=0.5),
    Routing(128, 8),
    Routing(16, 3, "sigmoid", scale=2.5, biased=True),
    Routing(64, 6, "sigmoid", biased=True, num_groups=8, top_groups=3),
    Routing(40, 6, renormalise=False, scale=16.0, num_groups=8, top_groups=3, group_best=1),
    Routing(33, 2, "sigmoid", renormalise=False),
    Routing(16, 2, "mixer", jitter=0.01),
    Routing(7, 2, "mixer", jitter=0.4, scale=1.5),
    Routing(128, 8, has_factors=True),
    Routing(7, 2, "mixer", jitter=0.4, has_factors=True),
)


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for routing in ROUTINGS:
        bias = normal(generator, routing.num_experts) if routing.biased else None
        factors = normal(generator, routing.num_experts) if routing.has_factors else None
        for rows in (1, 7, 300):
            logits = normal(generator, rows, routing.num_experts) * 3
            yield Case(label=f"{rows} rows, {routing}", args=(logits, routing, bias, factors))
    equal = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 2.0, -10.0, 10.0], [0.0] * 8])
    yield Case(label="equal scores", args=(equal, ROUTINGS[0], None))
