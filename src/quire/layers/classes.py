"""The head that sorts prompts into classes."""

from __future__ import annotations

import torch

from quire.layers.linear import Linear

__all__ = ["ClassHead"]


class ClassHead:
    """projection(tanh(dense(x))); x [N, E] → float32 [N, C] (Devlin et al. 2019, section 4.1)."""

    def __init__(self, dense: Linear, projection: Linear) -> None:
        self.dense, self.projection = dense, projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(torch.tanh(self.dense(x))).float()
