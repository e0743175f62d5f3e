"""SigLIP (Zhai et al. 2023, arXiv:2303.15343), the encoder of squares of pixels.

A square is cut into patches. Each is projected and gets a learned position; blocks with layer norms
before the sublayers let every patch see the whole square.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.compute.layers import LayerFactory
from quire.compute.models.towers.tower import normalised
from quire.compute.models.weight_map import WeightMap
from quire.config.media.image_spec import PixelLevels
from quire.config.media.siglip import SiglipSpec

__all__ = ["SiglipEncoder", "siglip_weights"]


def siglip_weights(
    name: str, others: Mapping[str, str], parts: Mapping[str, str] | None = None
) -> WeightMap:
    """Return the names of a tower with an `encoder`, a `SiglipEncoder`, and its `blocks`. name: the
    encoder's on disk. others: `outer` of the tower's other layers. parts: `WeightMap.parts`."""
    return WeightMap(
        prefix="model.",
        outer={
            f"{name}.embeddings.patch_embedding": "encoder.patches",
            f"{name}.embeddings.position_embedding": "encoder.positions",
            f"{name}.post_layernorm": "encoder.norm",
            **others,
        },
        blocks=f"{name}.encoder.layers.{{}}.",
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
        parts=parts or {},
    )


class SiglipBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); the sums are done by the norms."""

    def __init__(self, spec: SiglipSpec, make: LayerFactory) -> None:
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
        if x.device.type == "cpu" and x.itemsize == 2:
            return torch.cat([_attended(*tile) for tile in zip(q, k, v, strict=True)])
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of all to all, [H, P, D] each → [P, H · D]. On CPUs, products of 16 bits with all
    scores of a head between them take two thirds of the time of torch's fused operation."""
    heads, patches, size = q.shape
    found = q.new_empty(patches, heads, size)
    scores = q.new_empty(patches, patches)
    scaled = q * size**-0.5
    for head in range(heads):
        torch.mm(scaled[head], k[head].t(), out=scores)
        torch.softmax(scores, -1, out=scores)
        found[:, head] = scores @ v[head]
    return found.flatten(1)


class SiglipEncoder:
    """Square tiles to states of their patches."""

    def __init__(
        self,
        spec: SiglipSpec,
        levels: PixelLevels,
        make: LayerFactory,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        """position_ids: int64 [P], place of each patch in the table of positions; None: 0, 1, 2, …
        as in a grid read row by row."""
        self._levels, self._spec = levels, spec
        size, num_patches = spec.hidden_size, spec.patches_per_side**2
        self.patches = make.replicated(3 * spec.patch_size**2, size, bias=True)
        self.positions = make.embedding(num_patches, size)
        self.blocks = [SiglipBlock(spec, make) for _ in range(spec.num_layers)]
        self.norm = make.layer_norm(size, spec.norm_eps)
        self._position_ids = torch.arange(num_patches) if position_ids is None else position_ids

    def __call__(self, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 tiles [N, S, S, 3] → states [N · P, E], row by row of patches."""
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
        return self.norm.add(x, residual)[0]
