"""SigLIP (Zhai et al. 2023, arXiv:2303.15343) as the image encoder of Idefics 3 and SmolVLM
(arXiv:2408.12637), with the projection of its states to tokens of the language model.

A tile is cut into patches. Each is projected and gets a learned position; blocks with layer norms
before the sublayers let every patch see the whole tile. Pixel shuffle joins neighbours to one
longer vector (Shi et al. 2016, arXiv:1609.05158, the other way round).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.config.media.idefics3 import IdeficsSpec, TowerSpec
from quire.layers import LayerFactory
from quire.models.towers.tower import normalised
from quire.models.weight_map import WeightMap

__all__ = ["SiglipTower"]

WEIGHTS = WeightMap(
    prefix="model.vision_model.",
    outer={
        "embeddings.patch_embedding": "patches",
        "embeddings.position_embedding": "positions",
        "post_layernorm": "norm",
    },
    blocks="encoder.layers.{}.",
    block={
        "layer_norm1": "attention_norm",
        "self_attn.q_proj": "qkv:q",
        "self_attn.k_proj": "qkv:k",
        "self_attn.v_proj": "qkv:v",
        "self_attn.out_proj": "output",
        "layer_norm2": "mlp_norm",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
    },
    embedding="",
    head="",
    beside={"model.connector.modality_projection.proj": "projection"},
)


class SiglipBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); the sums are done by the norms."""

    def __init__(self, spec: TowerSpec, make: LayerFactory) -> None:
        size = spec.hidden_size
        self._num_heads = spec.num_heads
        self.attention_norm = make.layer_norm(size, spec.norm_eps)
        self.qkv = make.merged_column(size, {"q": size, "k": size, "v": size}, bias=True)
        self.output = make.row(size, size, bias=True)
        self.mlp_norm = make.layer_norm(size, spec.norm_eps)
        self.mlp = make.mlp(size, spec.intermediate_size, spec.activation, bias=True)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, num_tiles: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [P, E] of all patches of the tiles, and the residual stream, which the next norm
        adds."""
        x, residual = self.attention_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.output(self._attended(x, num_tiles)), residual)
        return self.mlp(x), residual

    def _attended(self, x: torch.Tensor, num_tiles: int) -> torch.Tensor:
        split = self.qkv(x).view(num_tiles, -1, 3, self._num_heads, x.shape[1] // self._num_heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


class SiglipTower:
    """`ImageTower` of square tiles. `lm_head`: None, as it has no logits."""

    def __init__(self, spec: IdeficsSpec, make: LayerFactory) -> None:
        tower = spec.tower
        self.weight_map = WEIGHTS
        self.lm_head = None
        self._levels, self._spec = spec.levels, tower
        size = tower.hidden_size
        self.patches = make.replicated(3 * tower.patch_size**2, size, bias=True)
        self.positions = make.embedding(tower.patches_per_side**2, size)
        self.blocks = [SiglipBlock(tower, make) for _ in range(tower.num_layers)]
        self.norm = make.layer_norm(size, tower.norm_eps)
        self.projection = make.replicated(size * tower.scale**2, tower.output_size, bias=False)
        self._position_ids = _position_ids(tower.patches_per_side)

    def encode(self, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 tiles [N, S, S, 3] → rows [N · tokens_per_tile, E] of the language model."""
        num_tiles, size = len(tiles), self._spec.patch_size
        per_side = self._spec.patches_per_side
        pixels = normalised(self._levels, tiles)
        cut = pixels.view(num_tiles, 3, per_side, size, per_side, size).permute(0, 2, 4, 1, 3, 5)
        flat = cut.reshape(num_tiles * per_side**2, 3 * size * size)
        ids = self._position_ids.to(tiles.device)
        x = self.patches(flat.to(dtype)) + self.positions(ids).repeat(num_tiles, 1)
        residual: torch.Tensor | None = None
        for block in self.blocks:
            x, residual = block(x, residual, num_tiles)
        return self.projection(self._joined(self.norm.add(x, residual)[0], num_tiles))

    def _joined(self, x: torch.Tensor, num_tiles: int) -> torch.Tensor:
        """Join squares of neighbours: [N · P, E] → [N · P / scale², E · scale²]."""
        scale, side = self._spec.scale, self._spec.patches_per_side // self._spec.scale
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
