"""Image encoders of Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631).

An image is one rectangle of patches, in the order of the squares that become one token each. Rows
and columns turn halves of q and k (Su et al. 2021, on two axes). In Qwen2.5 most layers see windows
alone. Qwen3 adds a learned position too, between rows and columns of a table, and some of its
layers give vectors that the language model adds behind its first layers (arXiv:2406.04334).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import gelu, scaled_dot_product_attention

from quire.compute.layers import LayerFactory
from quire.compute.models.towers.tower import normalised
from quire.compute.models.weight_map import WeightMap
from quire.config.media.qwen_vl import QwenSpec, QwenTowerSpec

__all__ = ["QwenTower"]

_ATTENTION = {
    "norm1": "attention_norm",
    "attn.qkv": "qkv",
    "attn.proj": "output",
    "norm2": "mlp_norm",
}
_GATED = WeightMap(
    prefix="model.",
    outer={
        "visual.patch_embed.proj": "patches",
        "visual.merger.ln_q": "merger.norm",
        "visual.merger.mlp.0": "merger.up",
        "visual.merger.mlp.2": "merger.down",
    },
    blocks="visual.blocks.{}.",
    block={
        **_ATTENTION,
        "mlp.gate_proj": "mlp.gate_up:gate",
        "mlp.up_proj": "mlp.gate_up:up",
        "mlp.down_proj": "mlp.down",
    },
    embedding="",
    head="",
)
_PLAIN = WeightMap(
    prefix="model.",
    outer={
        "visual.patch_embed.proj": "patches",
        "visual.pos_embed": "positions",
        "visual.merger.norm": "merger.norm",
        "visual.merger.linear_fc1": "merger.up",
        "visual.merger.linear_fc2": "merger.down",
        "visual.deepstack_merger_list.{}.norm": "deep_norms",
        "visual.deepstack_merger_list.{}.linear_fc1": "deep_ups",
        "visual.deepstack_merger_list.{}.linear_fc2": "deep_downs",
    },
    blocks="visual.blocks.{}.",
    block={**_ATTENTION, "mlp.linear_fc1": "mlp.up", "mlp.linear_fc2": "mlp.down"},
    embedding="",
    head="",
)
NORM_EPS = 1e-6

Groups = list[tuple[int, int]]
"""Neighbouring parts of the patches that see themselves alone: numbers of parts, and patches in
each."""

Turns = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of the angles of each patch, float32 [P, D / 2]."""


class QwenVisionBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); the sums are done by the norms."""

    def __init__(self, spec: QwenTowerSpec, make: LayerFactory) -> None:
        size, inner = spec.hidden_size, spec.intermediate_size
        self._num_heads = spec.num_heads
        norm = make.rms_norm if spec.gated else make.layer_norm
        self.attention_norm, self.mlp_norm = norm(size, NORM_EPS), norm(size, NORM_EPS)
        parts = {"q": size, "k": size, "v": size}
        self.qkv = make.merged_column(size, parts, bias=True, fused=not spec.splits_qkv)
        self.output = make.row(size, size, bias=True)
        if spec.gated:
            self.mlp = make.gated_mlp(size, inner, spec.activation, bias=True)
        else:
            self.mlp = make.mlp(size, inner, spec.activation, bias=True)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, turns: Turns, groups: Groups
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [P, E] and the residual stream, which the next norm adds."""
        x, residual = self.attention_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.output(self._attended(x, turns, groups)), residual)
        return self.mlp(x), residual

    def _attended(self, x: torch.Tensor, turns: Turns, groups: Groups) -> torch.Tensor:
        split = self.qkv(x).view(len(x), 3, self._num_heads, -1)
        q, k, v = _turned(split[:, 0], turns), _turned(split[:, 1], turns), split[:, 2]
        pieces: list[torch.Tensor] = []
        start = 0
        for count, length in groups:
            part = slice(start, start + count * length)
            own_q, own_k, own_v = (
                each[part].unflatten(0, (count, length)).transpose(1, 2) for each in (q, k, v)
            )
            found = scaled_dot_product_attention(own_q, own_k, own_v)
            pieces.append(found.transpose(1, 2).reshape(count * length, -1))
            start = part.stop
        return torch.cat(pieces)


class Merger:
    """Squares of neighbours to one vector each, through one hidden layer with exact GELU."""

    def __init__(self, spec: QwenTowerSpec, make: LayerFactory, *, norms_squares: bool) -> None:
        """norms_squares: norm whole squares and not each patch."""
        square, size = spec.square_size, spec.square_size if norms_squares else spec.hidden_size
        self.norm = (make.rms_norm if spec.gated else make.layer_norm)(size, NORM_EPS)
        self.up = make.replicated(square, square, bias=True)
        self.down = make.replicated(square, spec.output_size, bias=True)
        self._square, self._norms_squares = square, norms_squares

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x and residual [P, E], which are to be added → [P / merge², output_size]."""
        if self._norms_squares:
            x, residual = x.reshape(-1, self._square), residual.reshape(-1, self._square)
        normed = self.norm.add(x, residual)[0].reshape(-1, self._square)
        return self.down(gelu(self.up(normed)))


class QwenTower:
    """`ImageTower` of one tile of any size. `lm_head`: None, as it has no logits."""

    def __init__(self, spec: QwenSpec, make: LayerFactory) -> None:
        tower = spec.tower
        self.weight_map = _GATED if tower.gated else _PLAIN
        if tower.splits_qkv:
            own = {name: at for name, at in self.weight_map.block.items() if at != "qkv"}
            split = {f"attn.{part}": f"qkv:{part}" for part in ("q", "k", "v")}
            self.weight_map = replace(self.weight_map, block={**own, **split})
        self.lm_head = None
        self._images, self._spec = spec, tower
        self.patches = make.replicated(
            tower.patch_elements, tower.hidden_size, bias=not tower.gated
        )
        self.positions = None
        if tower.table_side:
            self.positions = make.embedding(tower.table_side**2, tower.hidden_size)
        self.blocks = [QwenVisionBlock(tower, make) for _ in range(tower.num_layers)]
        self.merger = Merger(tower, make, norms_squares=False)
        self._deep = [Merger(tower, make, norms_squares=True) for _ in tower.deep_layers]
        self.deep_norms = {place: each.norm for place, each in enumerate(self._deep)}
        self.deep_ups = {place: each.up for place, each in enumerate(self._deep)}
        self.deep_downs = {place: each.down for place, each in enumerate(self._deep)}

    def encode(self, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 [1, height, width, 3] → rows [T, (1 + num_deep) · E] of the language model."""
        spec, device = self._spec, tiles.device
        rows, columns = (pixels // spec.patch_size for pixels in tiles.shape[1:3])
        x = self.patches(self._cut(tiles).to(dtype))
        places = _by_square(rows, columns, spec.merge).to(device)
        if self.positions is not None:
            x = x + self._between(places, rows, columns).to(dtype)
        order, windows = _windows(rows // spec.merge, columns // spec.merge, spec)
        sorted_patches = (order[:, None] * spec.merge**2 + torch.arange(spec.merge**2)).flatten()
        sorted_patches = sorted_patches.to(device)
        x, places = x[sorted_patches], places[sorted_patches]
        whole, turns = [(1, len(x))], self._turns(places)
        residual: torch.Tensor | None = None
        deep: dict[int, torch.Tensor] = {}
        for layer, block in enumerate(self.blocks):
            sees_all = not spec.window or layer in spec.full_layers
            x, residual = block(x, residual, turns, whole if sees_all else windows)
            if layer in spec.deep_layers:
                place = spec.deep_layers.index(layer)
                deep[place] = self._deep[place](x, residual)
        assert residual is not None, "a tower has a layer"
        found = [self.merger(x, residual), *(deep[place] for place in range(len(deep)))]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return torch.cat(found, dim=1)[back.to(device)]

    def _cut(self, tiles: torch.Tensor) -> torch.Tensor:
        """uint8 [1, H, W, 3] → float32 [P, 3 · frames · patch²], in the order of squares."""
        spec, size = self._spec, self._spec.patch_size
        pixels = normalised(self._images.levels, tiles)[0]
        high, wide = (side // size // spec.merge for side in pixels.shape[1:])
        cut = pixels.view(3, high, spec.merge, size, wide, spec.merge, size)
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return cut.expand(-1, -1, -1, -1, -1, spec.frames, -1, -1).reshape(-1, spec.patch_elements)

    def _between(self, places: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return learned positions, float32 [P, E]: between those of the four nearest places of the
        table, whose corners are those of the image."""
        assert self.positions is not None
        side = self._spec.table_side
        taps: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for axis, length in enumerate((rows, columns)):
            at = places[:, axis].float() * (side - 1) / max(length - 1, 1)
            low = at.floor()
            share = at - low
            first = low.long()
            taps.append([(first, 1 - share), ((first + 1).clamp(max=side - 1), share)])
        found: torch.Tensor | None = None
        for row, row_share in taps[0]:
            for column, column_share in taps[1]:
                corner = self.positions(row * side + column).float()
                weighted = corner * (row_share * column_share)[:, None]
                found = weighted if found is None else found + weighted
        assert found is not None
        return found

    def _turns(self, places: torch.Tensor) -> Turns:
        """Return cos and sin of patches at places [P, 2]: rows turn the first half of the pairs,
        columns the second."""
        size = self._spec.hidden_size // self._spec.num_heads // 2
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        angles = places[..., None].float() * (1.0 / self._spec.theta**exponents).to(places.device)
        flat = angles.flatten(1)
        return flat.cos(), flat.sin()


def _turned(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Rotate heads [P, H, D]: pair j is elements j and j + D / 2, in float32."""
    cos, sin = (each[:, None] for each in turns)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _by_square(rows: int, columns: int, merge: int) -> torch.Tensor:
    """Row and column of each patch, [rows · columns, 2]: square by square, row by row in each."""
    places = torch.stack(
        torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1
    )
    squares = places.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
    return squares.reshape(-1, 2)


def _windows(rows: int, columns: int, spec: QwenTowerSpec) -> tuple[torch.Tensor, Groups]:
    """Return an order of tokens [rows · columns] in which windows lie together, those of one size
    one after the other, and these groups, in patches."""
    side = spec.window // spec.patch_size // spec.merge
    if not side:
        return torch.arange(rows * columns), []
    row = torch.arange(rows)[:, None].expand(rows, columns).flatten()
    column = torch.arange(columns).repeat(rows)
    per_row = -(-columns // side)
    window = row // side * per_row + column // side
    sizes = window.bincount()
    by_size = sizes.unique()
    # Windows of one size are computed together. A stable order keeps rows in a window in order.
    order = torch.argsort(sizes[window] * len(sizes) + window, stable=True)
    groups = [(int((sizes == size).sum()), int(size) * spec.merge**2) for size in by_size]
    return order, groups
