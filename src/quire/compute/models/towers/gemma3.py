"""Image encoder of Gemma 3 (arXiv:2503.19786, section 2.1): SigLIP, the means of squares of its
states, and their projection to tokens of the language model.
"""

from __future__ import annotations

import torch

from quire.compute.layers import LayerFactory
from quire.compute.models.towers.siglip import SiglipEncoder, siglip_weights
from quire.config.media.gemma3 import Gemma3ImageSpec

__all__ = ["Gemma3Tower"]


class Gemma3Tower:
    """`ImageTower` of one square. `lm_head`: None, as it has no logits."""

    weight_map = siglip_weights(
        "vision_tower",
        {
            "multi_modal_projector.mm_soft_emb_norm": "norm",
            "multi_modal_projector.mm_input_projection": "projection",
        },
        {
            "vision_tower.vision_model.": "vision_tower.",
            "mm_input_projection_weight": "mm_input_projection.weight",
        },
    )

    def __init__(self, spec: Gemma3ImageSpec, make: LayerFactory) -> None:
        tower = spec.tower
        self.lm_head = None
        self._side, self._pool = spec.tokens_per_side, spec.pool
        self.encoder = SiglipEncoder(tower, spec.levels, make)
        self.blocks = self.encoder.blocks
        self.norm = make.rms_norm(tower.hidden_size, tower.norm_eps, offset=1.0)
        self.projection = make.replicated(
            tower.hidden_size, spec.output_size, bias=False, transposed=True
        )

    def encode(self, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 tiles [N, S, S, 3] → rows [N · whole_tokens, E] of the language model."""
        states = self.encoder(tiles, dtype)
        side, pool = self._side, self._pool
        squares = states.view(len(tiles), side, pool, side, pool, states.shape[1])
        return self.projection(self.norm(squares.mean((2, 4)).flatten(0, 2)))
