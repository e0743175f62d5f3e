"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

The cache has one vector for each token, from which every head's keys and values could be made. They
never are: each query is multiplied by the matrix of its head's keys instead, so that it meets the
vector itself, and each output by the matrix of its head's values (section 2.1.2, the absorbed
form). Steps of every size are computed in this form, although keys and values made anew take less
arithmetic from 171 queries on, in the sizes of DeepSeek V3: the two forms round differently, and a
token's bits would then depend on the chunk that it is computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from quire.base.errors import EngineError
from quire.compute.attention import AttentionBackend, StepInputs
from quire.compute.layers.adapted import Projection
from quire.compute.layers.norm import RMSNorm
from quire.compute.layers.rotary import RotaryEmbedding
from quire.compute.layers.weights import Cut, DenseWeights, Placement
from quire.config.model_spec import LatentSpec
from quire.config.shard import Share
from quire.ops import OpSet
from quire.ops.linear.by_head import HeadMatrices

__all__ = ["LATENT_EPS", "LatentAttention", "LatentHeads", "LatentParts", "LatentUp"]

LATENT_EPS = 1e-6
"""Epsilon of the norms of vectors that queries, keys and values are made of, whatever that of
others is."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """A rank's share of the query heads. sizes: sizes of the model. pairs_neighbours: True if the
    two rows of a rotated pair are adjacent on disk."""

    query: Share
    sizes: LatentSpec
    pairs_neighbours: bool

    @property
    def down(self) -> Mapping[str, Share]:
        """Outputs of the projection of x: the vector that queries are made of, or queries, and the
        vector of the token."""
        rank = self.sizes.query_rank
        queries = self.query.times(self.sizes.query) if rank is None else Share.whole(rank)
        return {"q": queries, "kv": Share.whole(self.sizes.width)}

    @property
    def up(self) -> Mapping[str, Share]:
        """Outputs of the projection to queries, if it is another one."""
        return {"": self.query.times(self.sizes.query)}

    @property
    def down_orders(self) -> Mapping[str, torch.Tensor]:
        """Place on disk of each of this rank's outputs of `down`, for the parts that change it."""
        size, rows = self.sizes.rank, torch.arange(self.sizes.width)
        orders = {"kv": torch.cat((rows[:size], self._turned(rows[size:])))}
        return orders if self.sizes.query_rank is not None else {**orders, "q": self._of_queries()}

    @property
    def up_orders(self) -> Mapping[str, torch.Tensor]:
        """Place on disk of each of this rank's outputs of `up`."""
        return {"": self._of_queries()}

    def _of_queries(self) -> torch.Tensor:
        """All parts that do not rotate, head by head, and then those that do."""
        rows = torch.arange(self.query.count * self.sizes.query).view(self.query.count, -1)
        nope, rotated = rows[:, : self.sizes.nope], rows[:, self.sizes.nope :]
        return torch.cat((nope.flatten(), self._turned(rotated).flatten()))

    def _turned(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., R]: the first ones of all pairs, and then the second ones."""
        if not self.pairs_neighbours:
            return rows
        return torch.cat((rows[..., ::2], rows[..., 1::2]), dim=-1)


class LatentUp:
    """Matrices from the vector of a token to the keys and values of this rank's heads, in the
    model's dtype whatever the format of others.

    keys: from a head's query to one that meets the vector. values: from the vector to a head's
    value. Both raise EngineError before the weights are loaded.
    """

    def __init__(self, ops: OpSet, heads: LatentHeads, placement: Placement) -> None:
        self._pack, count = ops.linear_by_head, heads.query.count
        self._sizes = sizes = heads.sizes
        shapes = {"weight": (count * (sizes.nope + sizes.value), sizes.rank)}
        units = {"weight": sizes.nope + sizes.value}
        if sizes.split:
            shapes = {
                "k.weight": (count, sizes.rank, sizes.nope),
                "v.weight": (count, sizes.value, sizes.rank),
            }
            units = dict.fromkeys(shapes, 1)
        storage = {part: placement.empty(*shape) for part, shape in shapes.items()}
        cuts = {part: Cut(0, heads.query.times(unit)) for part, unit in units.items()}
        self.weights = _Released(storage, {} if heads.query.is_whole else cuts, self._take)
        self._keys: HeadMatrices | None = None
        self._values: HeadMatrices | None = None

    @property
    def keys(self) -> HeadMatrices:
        return _loaded(self._keys)

    @property
    def values(self) -> HeadMatrices:
        return _loaded(self._values)

    def _take(self, storage: Mapping[str, torch.Tensor]) -> None:
        if self._sizes.split:
            keys, values = storage["k.weight"], storage["v.weight"]
        else:
            nope, value = self._sizes.nope, self._sizes.value
            by_head = storage["weight"].view(-1, nope + value, self._sizes.rank)
            keys, values = by_head[:, :nope].transpose(1, 2), by_head[:, nope:]
        self._keys, self._values = self._pack(keys), self._pack(values)


class _Released(DenseWeights):
    """Weights that are given to `take` once all of them are loaded, and not kept."""

    def __init__(
        self,
        storage: Mapping[str, torch.Tensor],
        cuts: Mapping[str, Cut],
        take: Callable[[Mapping[str, torch.Tensor]], None],
    ) -> None:
        super().__init__(storage, cuts=cuts)
        self._take = take

    def finish(self) -> None:
        super().finish()
        self._take(self._storage)
        self._storage = {part: tensor.to("meta") for part, tensor in self._storage.items()}


def _loaded(matrices: HeadMatrices | None) -> HeadMatrices:
    if matrices is None:
        raise EngineError("Latent attention was used before its weights were loaded; a bug.")
    return matrices


@dataclass(frozen=True, slots=True)
class LatentParts:
    """Projections of one layer. down: x to the parts of `LatentHeads.down`. query_norm, query: norm
    of the vector that queries are made of, and their projection; None if `down` gives them. norm:
    norm of the vector of a token. up: matrices of the heads."""

    down: Projection
    query_norm: RMSNorm | None
    query: Projection | None
    norm: RMSNorm
    up: LatentUp


class LatentAttention:
    """Writes the vectors of tokens, and attends to those of the cache; x [T, E] → [T, H · value] of
    this rank.

    layer: model layer index, which picks the plane and the group of the KV pool. scale: factor on
    q·k.
    """

    def __init__(
        self,
        ops: OpSet,
        backend: AttentionBackend,
        rotary: RotaryEmbedding,
        layer: int,
        heads: LatentHeads,
        scale: float,
        projections: LatentParts,
    ) -> None:
        self._write_latent = ops.write_latent
        self._backend, self._rotary, self._layer = backend, rotary, layer
        self._count, self._sizes = heads.query.count, heads.sizes
        self._num_down = heads.down["q"].count
        self._scale = scale
        self.down, self.query = projections.down, projections.query
        self.query_norm, self.norm, self.up = (
            projections.query_norm,
            projections.norm,
            projections.up,
        )

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """x [T, E], positions [T] → [T, H · value]."""
        sizes, count = self._sizes, self._count
        down = self.down(x)
        q, latent = down[:, : self._num_down], down[:, self._num_down :]
        if self.query_norm is not None and self.query is not None:
            q = self.query(self.query_norm(q))
        queries = torch.empty((len(x), count, sizes.width), dtype=x.dtype, device=x.device)
        # A view of one row would have another stride.
        nope = q.as_strided((len(x), count, sizes.nope), (q.stride(0), sizes.nope, 1))
        self.up.keys(nope, queries[..., : sizes.rank])
        positions, cos, sin = self._rotary.at(positions)
        cache = step.kv.layers[self._layer]
        group = step.groups[step.kv.groups[self._layer]]
        self._write_latent(
            queries,
            q[:, count * sizes.nope :],
            latent,
            self.norm.weight,
            self.norm.eps,
            positions,
            cos,
            sin,
            cache.k,
            group.slot_mapping,
            cache.k_scale,
        )
        found = self._backend.run(queries, cache, self._scale, step, group)
        out = torch.empty((len(x), count, sizes.value), dtype=x.dtype, device=x.device)
        self.up.values(found, out)
        return out.flatten(1)
