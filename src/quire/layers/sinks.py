"""Attention sinks: scores of a key without a value (Xiao et al. 2024, arXiv:2309.17453)."""

from __future__ import annotations

import torch

from quire.attention import ScoreOptions
from quire.config.shard import Share
from quire.layers.weights import Cut, DenseWeights

__all__ = ["Sinks"]


class Sinks:
    """One learned score for each query head of this rank, float32 [H].

    scores: options for the attention of a layer.
    """

    def __init__(self, heads: Share, device: torch.device) -> None:
        values = torch.empty(heads.count, dtype=torch.float32, device=device)
        cuts = {} if heads.is_whole else {"": Cut(0, heads)}
        self.weights = DenseWeights({"": values}, cuts=cuts)
        self.scores = ScoreOptions(sinks=values)
