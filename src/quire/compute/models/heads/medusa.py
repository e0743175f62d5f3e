"""Medusa (Cai et al. 2024, arXiv:2401.10774, section 2.1.1): heads on the last hidden state.

Head i guesses the token i + 2 places after the one whose state it reads: residual blocks, then a
projection to logits of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from quire.base.errors import ConfigError
from quire.compute.layers import LayerFactory, ResidualBlock
from quire.compute.models.heads.weights import HeadWeights, fill_layer, read_head_weights
from quire.config import ModelSpec
from quire.ops import PackedMatrix

__all__ = ["MedusaHeads", "load_medusa"]

_PREFIX = r"(?:medusa_lm_head\.|medusa_heads?\.|model\.)*"
_PUBLISHED = re.compile(_PREFIX + r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
"""Head, and place in it: residual blocks, and behind them the projection."""

_BLOCKS = re.compile(_PREFIX + r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_LM_HEADS = re.compile(_PREFIX + r"lm_heads\.(\d+)\.weight")
"""The same by kind, as other engines save them."""


class _Head:
    def __init__(self, blocks: list[ResidualBlock], projection: PackedMatrix) -> None:
        self.blocks = blocks
        self.projection = projection


class MedusaHeads:
    """Heads that are loaded. num_heads: the most tokens that they guess."""

    def __init__(self, heads: list[_Head]) -> None:
        self._heads = heads
        self.num_heads = len(heads)

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E], after the final norm → float32 [N, V]."""
        found = self._heads[head]
        for block in found.blocks:
            hidden = block(hidden)
        return found.projection(hidden, torch.float32)


def load_medusa(spec: ModelSpec, file: Path, make: LayerFactory) -> MedusaHeads:
    """Load heads for the model of `spec`. The tensors say how many there are, since published
    configs are wrong about it. Raises ConfigError for tensors of another layout or shape."""
    weights = read_head_weights(file)
    names = {key: name for name in weights.names if (key := _place(name)) is not None}
    count = 1 + max((head for head, _, _ in names), default=-1)
    if not count:
        raise ConfigError(
            f"{file}: has no tensors of Medusa heads, such as '0.0.linear.weight' or "
            "'blocks.0.layers.0.weight'; use another file"
        )
    dtype: torch.dtype = getattr(torch, spec.dtype)
    heads = [_load_head(head, names, weights, spec, dtype, make) for head in range(count)]
    weights.finish()
    return MedusaHeads(heads)


_PROJECTION = -1


def _place(name: str) -> tuple[int, int, str] | None:
    """Return head, block and kind of a tensor; the block of a projection is _PROJECTION."""
    if found := _PUBLISHED.fullmatch(name):
        head, block, kind = int(found[1]), int(found[2]), found[3]
        return (head, _PROJECTION, kind) if kind == "weight" else (head, block, kind[7:])
    if found := _BLOCKS.fullmatch(name):
        return int(found[1]), int(found[2]), found[3]
    if found := _LM_HEADS.fullmatch(name):
        return int(found[1]), _PROJECTION, "weight"
    return None


def _load_head(
    head: int,
    names: dict[tuple[int, int, str], str],
    weights: HeadWeights,
    spec: ModelSpec,
    dtype: torch.dtype,
    make: LayerFactory,
) -> _Head:
    size = spec.hidden_size
    num_blocks = 1 + max((block for own, block, _ in names if own == head), default=-1)
    blocks: list[ResidualBlock] = []
    for index in range(num_blocks):
        kinds = {kind: name for (*place, kind), name in names.items() if place == [head, index]}
        kinds.setdefault("weight", f"{head}.{index}.linear.weight")
        block = make.residual_block(size, bias="bias" in kinds)
        fill_layer(block.linear, weights, kinds, dtype)
        blocks.append(block)
    name = names.get((head, _PROJECTION, "weight"), f"{head}.{num_blocks}.weight")
    projection = weights.take(name, (spec.vocab_size, size), dtype)
    return _Head(blocks, make.head_of(projection, None))
