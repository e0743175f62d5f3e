"""Mixtures of experts as checkpoints describe them (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ExpertNames", "ExpertsSpec", "Routing"]

ExpertNames = Literal["qwen", "deepseek", "gpt_oss", "mixtral", "granite"]
"""Families whose names of tensors others share."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of the experts of a token, and their weights.

    score: of an expert, from the router's logits. top_k: experts of a token. renormalise: weights
    are divided by their sum. scale: what they are multiplied by then. biased: numbers of the
    checkpoint are added to the scores for the choice, and not to the weights. num_groups,
    top_groups: experts are in so many groups, of which only the best so many are open to a token; a
    group counts the two best of its experts (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    biased: bool = False
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Feed-forward networks of which a router chooses some for each token.

    layers: by layer of the model, whether it has experts; others have one network. inner_size: of
    an expert. shared_size: of a network that every token takes besides, None for none;
    shared_gated: its output is multiplied by the sigmoid of a projection to one number. bias: of
    the router and of experts. names: of the tensors on disk.
    """

    routing: Routing
    layers: tuple[bool, ...]
    inner_size: int
    names: ExpertNames
    shared_size: int | None = None
    shared_gated: bool = False
    bias: bool = False

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return sum(self.layers)

    def layer_parameters(self, hidden_size: int) -> int:
        """Parameters of the experts of a layer and of all that is beside them."""
        routing, shared = self.routing, self.shared_size or 0
        router = routing.num_experts * (hidden_size + routing.biased)
        others = router + 3 * hidden_size * shared + self.shared_gated * hidden_size
        biases = self.bias * (2 * self.inner_size + hidden_size + 1)
        return others + (3 * hidden_size * self.inner_size + biases) * routing.num_experts

    def idle_parameters(self, hidden_size: int) -> int:
        """Parameters of a layer that a token does not use."""
        idle = self.routing.num_experts - self.routing.top_k
        return 3 * hidden_size * self.inner_size * idle
