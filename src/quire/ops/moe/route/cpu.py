"""`route` by the C++ kernel (csrc/moe/route.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from quire.config.model_spec import Routing
from quire.ops.moe.route.contract import check_arguments
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import pointer

__all__ = ["bind"]

_SCORES: Mapping[str, int] = MappingProxyType({"softmax": 0, "sigmoid": 1, "mixer": 2})
"""Scores, as the kernel numbers them."""


def bind(library: NativeLibrary) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`route` on `library`; contract in `quire.ops.moe.route`."""
    call = library.call

    def route(
        logits: torch.Tensor,
        routing: Routing,
        bias: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_arguments(logits, routing, bias, factors)
        logits = logits.contiguous()
        rows = logits.shape[0]
        ids = torch.empty((rows, routing.top_k), dtype=torch.int32)
        weights = torch.empty((rows, routing.top_k), dtype=torch.float32)
        call(
            "route",
            logits.data_ptr(),
            pointer(bias),
            pointer(factors),
            ids.data_ptr(),
            weights.data_ptr(),
            rows,
            routing.num_experts,
            routing.top_k,
            routing.num_groups,
            routing.top_groups,
            routing.group_best,
            _SCORES[routing.score],
            int(routing.renormalise),
            routing.scale,
            routing.jitter,
        )
        return ids, weights

    return route
