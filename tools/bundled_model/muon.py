"""Muon for the matrices of the layers (Jordan et al. 2024): momentum, made orthogonal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# Quintic Newton-Schulz coefficients of the Muon article: they drive singular values towards one.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest (semi-)orthogonal matrices of a stack [N, rows, columns], approximately."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Updates 2-D weights in place; matrices of one shape are handled as one stack."""

    def __init__(self, weights: Iterable[Tensor], momentum: float, weight_decay: float) -> None:
        self._groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for weight in weights:
            self._groups[weight.shape].append(weight)
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._buffers = {
            shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with learning rate `lr`; gradients must be set."""
        for shape, group in self._groups.items():
            gradients = torch.stack([weight.grad for weight in group if weight.grad is not None])
            buffer = self._buffers[shape]
            buffer.lerp_(gradients, 1 - self._momentum)
            update = orthogonalize(gradients.lerp(buffer, self._momentum))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for weight, change in zip(group, update, strict=True):
                weight.mul_(1 - lr * self._weight_decay).add_(change, alpha=-lr * scale)

    def state_dict(self) -> dict[str, Tensor]:
        return {str(tuple(shape)): buffer for shape, buffer in self._buffers.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for shape, buffer in self._buffers.items():
            buffer.copy_(state[str(tuple(shape))])
