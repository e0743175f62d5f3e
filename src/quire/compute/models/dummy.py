"""Random weights without files, to try sizes and speeds of a model that is not on disk."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping

import torch

from quire.compute.models.weight_map import WeightTarget

__all__ = ["dummy_weights"]

BLOCK_ELEMENTS = 1_000_003
"""Random numbers are drawn once and repeated; a prime, so that rows of a matrix differ."""

SCALE = 0.02
"""Scale of the weights: the initializer_range that most published models were started from."""


def dummy_weights(
    targets: Mapping[str, WeightTarget], dtype: torch.dtype, seed: int
) -> Iterator[tuple[WeightTarget, torch.Tensor]]:
    """A tensor for every target; same seed, same weights. Norm weights are one, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.rand(BLOCK_ELEMENTS, generator=generator) * 2 - 1) * SCALE * 3**0.5
    noise = noise.to(dtype)
    longest = max((math.prod(target.shape) for target in targets.values()), default=0)
    scratch = torch.empty(longest, dtype=dtype)
    for name, target in targets.items():
        tensor = scratch[: math.prod(target.shape)]
        if len(target.shape) == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            _repeat(noise.roll(zlib.crc32(name.encode()) % BLOCK_ELEMENTS), tensor)
        yield target, tensor.view(target.shape)


def _repeat(noise: torch.Tensor, out: torch.Tensor) -> None:
    """Fill the flat `out` with the noise, over and over."""
    for piece in out.split(noise.numel()):
        piece.copy_(noise[: piece.numel()])
