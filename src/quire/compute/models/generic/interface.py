"""Attention under the name by which `transformers` finds it.

Its models call `attend(module, q, k, v, mask, …)` for each layer. No function that makes masks is
registered beside it, so that none is made: every row of the flat batch sees its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["NAME", "AttentionCall", "connect", "register"]

NAME = "quire"
_HANDLER = "_quire_attention"


class AttentionCall(NamedTuple):
    """A layer asks for this. q [1, H, T, Dk], k and v [1, K, T, D]; sinks: None or [H]."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    is_causal: bool
    is_masked: bool  # by a mask of the model's own


Handler = Callable[[AttentionCall], torch.Tensor]
"""Gives [1, T, H, Dv]."""


def register() -> None:
    """Make the name known to `transformers`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def connect(model: nn.Module, handler: Handler) -> None:
    """Have the attention layers of `model` call `handler`."""
    for module in model.modules():
        setattr(module, _HANDLER, handler)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    handler: Handler = getattr(module, _HANDLER)
    causal: Any = getattr(module, "is_causal", True) if is_causal is None else is_causal
    layer: Any = getattr(module, "layer_idx", None)
    call = AttentionCall(
        -1 if layer is None else int(layer),
        query,
        key,
        value,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window,
        softcap,
        s_aux,
        bool(causal),
        attention_mask is not None,
    )
    return handler(call), None
