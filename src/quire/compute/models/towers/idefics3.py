"""Encoder of the tiles of Idefics 3 and SmolVLM (arXiv:2408.12637): SigLIP, and the projection of
its states to tokens of the language model.

Pixel shuffle joins neighbours to one longer vector (Shi et al. 2016, arXiv:1609.05158, the other
way round).
"""

from __future__ import annotations

import torch

from quire.compute.layers import LayerFactory
from quire.compute.models.towers.siglip import SiglipEncoder, siglip_weights
from quire.config.media.idefics3 import IdeficsSpec

__all__ = ["IdeficsTower"]


class IdeficsTower:
    """`ImageTower` of square tiles. `lm_head`: None, as it has no logits."""

    weight_map = siglip_weights(
        "vision_model", {"connector.modality_projection.proj": "projection"}
    )

    def __init__(self, spec: IdeficsSpec, make: LayerFactory) -> None:
        tower = spec.tower
        self.lm_head = None
        self._side, self._scale = tower.patches_per_side, spec.scale
        position_ids = _position_ids(tower.patches_per_side)
        self.encoder = SiglipEncoder(tower, spec.levels, make, position_ids)
        self.blocks = self.encoder.blocks
        joined_size = tower.hidden_size * spec.scale**2
        self.projection = make.replicated(joined_size, spec.output_size, bias=False)

    def encode(self, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 tiles [N, S, S, 3] → rows [N · tokens_per_tile, E] of the language model."""
        return self.projection(self._joined(self.encoder(tiles, dtype), len(tiles)))

    def _joined(self, x: torch.Tensor, num_tiles: int) -> torch.Tensor:
        """Join squares of neighbours: [N · P, E] → [N · P / scale², E · scale²]."""
        scale, side = self._scale, self._side // self._scale
        squares = x.view(num_tiles, side, scale, side, scale, x.shape[1])
        return squares.transpose(2, 3).reshape(num_tiles * side**2, scale**2 * x.shape[1])


def _position_ids(per_side: int) -> torch.Tensor:
    """Row of the table of positions for each patch, on a grid of fractions, as the encoder
    was trained for images of any size. For whole tiles it is 0, 1, 2, …, but for rounding."""
    step = 1.0 / torch.tensor(per_side)
    bounds = torch.arange(1 / per_side, 1.0, 1 / per_side)
    places = (torch.arange(per_side, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
    index = torch.bucketize(places, bounds, right=True)
    return (index[:, None] * per_side + index[None, :]).reshape(-1)
