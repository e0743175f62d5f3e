"""Interface of image encoders, and their way from pixels to numbers."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import numpy as np
import torch

from quire.compute.layers import LayerFactory
from quire.compute.models.weight_map import WeightMap
from quire.config.media.image_spec import ImageSpec, PixelLevels

__all__ = ["ImageTower", "find_tower", "normalised"]


class ImageTower(Protocol):
    """Tiles of an image to rows for the language model."""

    @property
    def weight_map(self) -> WeightMap:
        """Names of its tensors, as files of today have them."""
        ...

    def encode(self, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 tiles [N, height, width, 3] → rows [T, (1 + num_deep) · E] of `ImageSpec.num_rows`
        tokens, E elements of an embedding first."""
        ...


def find_tower(spec: ImageSpec, make: LayerFactory) -> ImageTower:
    """Build the encoder that `ImageSpec.encoder` names."""
    module, _, name = spec.encoder.partition(":")
    return getattr(import_module(module), name)(spec, make)


def normalised(spec: PixelLevels, tiles: torch.Tensor) -> torch.Tensor:
    """uint8 [N, H, W, 3] → float32 [N, 3, H, W], (x · factor − mean) / std, with the roundings of
    `transformers`: the product in float64, then all in float32."""
    levels = (np.arange(256, dtype=np.float64) * spec.factor).astype(np.float32)[:, None]
    mean, std = (np.array(values, np.float32) for values in (spec.mean, spec.std))
    table = torch.from_numpy((levels - mean) / std).to(tiles.device)
    channels = (table[:, i].take(tiles[..., i].long()) for i in range(len(spec.mean)))
    return torch.stack(list(channels), dim=1)
