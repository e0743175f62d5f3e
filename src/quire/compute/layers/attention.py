"""Attention over the paged cache: all work between the qkv projection and the output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.compute.attention import AttentionBackend, ScoreOptions, StepInputs
from quire.compute.layers.cache_bias import CacheBiases
from quire.compute.layers.norm import HeadNorm, RMSNorm, SharedRMSNorm
from quire.compute.layers.rotary import RotaryEmbedding
from quire.compute.layers.scaling import QueryGrowth
from quire.compute.layers.weights import Cut, DenseWeights
from quire.config.shard import Share
from quire.ops import OpSet

__all__ = ["Attention", "Heads", "Sinks"]


@dataclass(frozen=True, slots=True)
class Heads:
    """A rank's share of the attention heads. dim: head_dim."""

    query: Share
    kv: Share
    dim: int

    @property
    def own(self) -> tuple[int, int, int]:
        """This rank's number of query heads, number of kv heads, and head_dim."""
        return self.query.count, self.kv.count, self.dim

    @property
    def projections(self) -> dict[str, Share]:
        """Outputs of the projections to q, k and v."""
        query, kv = self.query.times(self.dim), self.kv.times(self.dim)
        return {"q": query, "k": kv, "v": kv}

    @property
    def by_kv_head(self) -> Share:
        """Outputs of one projection that has, for each kv head in turn, its query heads, k and
        v."""
        group, (queries,) = self.query.total // self.kv.total, self.query.ranges
        ranges: list[range] = []
        for head in (head for each in self.kv.ranges for head in each):
            first, after = max(queries.start, head * group), min(queries.stop, (head + 1) * group)
            ranges.append(range(first + 2 * head, after + 2 * head))
            ranges.append(range((head + 1) * group + 2 * head, (head + 1) * (group + 2)))
        return Share(self.query.total + 2 * self.kv.total, tuple(ranges)).times(self.dim)


class Attention:
    """Normalises and rotates the heads if the model does, writes K/V, and attends to the cache.

    layer: model layer index, which picks the plane and the group of the KV pool. scale: factor on
    q·k. biases: options of the scores, and the biases left out of the cache. kv_layer: the layer
    whose K and V are read, if another one's; qkv is q alone then. keys_are_values: qkv is q and k,
    and V is k before its norm. v_norm: norm over a head of V. parts: shares of the outputs of qkv.
    q_norm, k_norm: norms over a head (Qwen3) or over the row of all heads (OLMo 2), or None.
    rotary: None if positions are learned or the layer has none. growth: scaling of queries by their
    positions, or None.
    """

    def __init__(
        self,
        ops: OpSet,
        backend: AttentionBackend,
        layer: int,
        heads: Heads,
        scale: float,
        rotary: RotaryEmbedding | None,
        biases: CacheBiases,
        q_norm: RMSNorm | SharedRMSNorm | None = None,
        k_norm: RMSNorm | SharedRMSNorm | None = None,
        *,
        device: torch.device,
        growth: QueryGrowth | None = None,
        kv_layer: int | None = None,
        keys_are_values: bool = False,
        v_norm: HeadNorm | None = None,
    ) -> None:
        self._rope_and_write_kv = ops.rope_and_write_kv
        self._take_columns = ops.take_columns
        self._backend = backend
        self._layer = layer if kv_layer is None else kv_layer
        self._reads_another = self._layer != layer
        self._v_norm = None if self._reads_another else v_norm
        self.parts = heads.projections
        if self._reads_another:
            self.parts = {"q": self.parts["q"]}
        elif keys_are_values:
            self.parts = {part: self.parts[part] for part in "qk"}
        self._with_values = None
        if keys_are_values and not self._reads_another:
            count, rows = heads.own[1] * heads.dim, (heads.own[0] + heads.own[1]) * heads.dim
            order = torch.cat((torch.arange(rows), torch.arange(rows - count, rows)))
            self._with_values = order.to(device)
        self.heads = heads
        self._num_heads, self._num_kv_heads, self._head_dim = heads.own
        self._scale, self.biases = scale, biases
        self._rotary = rotary
        self.q_norm, self.k_norm = q_norm, k_norm
        self._growth = growth

    def orders_of_pairs(self) -> dict[str, torch.Tensor]:
        """Return for each row of q and k its row on disk, within this rank's share. On disk the two
        rows of a rotated pair are adjacent; here the first rows of all pairs precede the second
        ones."""
        rotated = 0 if self._rotary is None else 2 * self._rotary.cos.shape[1]
        rows = torch.arange(self._head_dim)
        in_head = torch.cat((rows[:rotated:2], rows[1:rotated:2], rows[rotated:]))
        return {
            part: (torch.arange(count)[:, None] * self._head_dim + in_head).flatten()
            for part, count in (("q", self._num_heads), ("k", self._num_kv_heads))
        }

    def order_of_heads(self) -> torch.Tensor:
        """Return for each row of qkv its row on disk, where each kv head's query heads, k and v are
        adjacent: int64 [(H + 2K)·D] of this rank."""
        heads = self._num_heads + 2 * self._num_kv_heads
        rows = torch.arange(heads * self._head_dim)
        by_group = rows.view(self._num_kv_heads, -1, self._head_dim)
        parts = (by_group[:, :-2], by_group[:, -2], by_group[:, -1])
        return torch.cat([part.flatten() for part in parts])

    def order_of_gates(self) -> torch.Tensor:
        """Return for each row of the gates, and then of q, its row on disk, where those of a head
        are adjacent, q first: int64 [2·H·D] of this rank."""
        rows = torch.arange(2 * self._num_heads * self._head_dim)
        q, gates = rows.view(self._num_heads, 2, self._head_dim).unbind(1)
        return torch.cat((gates.flatten(), q.flatten()))

    def __call__(
        self, qkv: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """Attend. qkv [T, (H + 2K)·D], of any row stride, is changed in place; positions [T] or
        [3, T] → [T, H·D]."""
        if self._with_values is not None:
            qkv = self._take_columns(qkv, self._with_values)
        if self._v_norm is not None:
            self._v_norm(qkv[:, -self._num_kv_heads * self._head_dim :])
        cos = sin = None
        q_norm, k_norm = self._norms_of_heads(qkv)
        if self._rotary is not None:
            positions, cos, sin = self._rotary.at(positions)
        cache = step.kv.layers[self._layer]
        group = step.groups[step.kv.groups[self._layer]]
        own = cache.without_heads() if self._reads_another else cache
        self._rope_and_write_kv(
            qkv,
            self._num_heads,
            positions,
            cos,
            sin,
            own.k,
            own.v,
            group.slot_mapping,
            own.k_scale,
            own.v_scale,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
        )
        heads = (len(qkv), self._num_heads, self._head_dim)
        q = qkv.as_strided(
            heads, (qkv.stride(0), self._head_dim, 1)
        )  # a view of one row has another
        if self._growth is not None:
            q = self._growth(q, positions)
        return self._backend.run(q, cache, self._scale, step, group, self.biases.scores).flatten(1)

    def _norms_of_heads(self, qkv: torch.Tensor) -> tuple[RMSNorm | None, RMSNorm | None]:
        """Apply norms over whole rows, and return the norms that are left to do."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if self._reads_another:  # no key of its own
            k_norm = q_norm
        if not (isinstance(q_norm, SharedRMSNorm) and isinstance(k_norm, SharedRMSNorm)):
            assert not isinstance(q_norm, SharedRMSNorm)
            assert not isinstance(k_norm, SharedRMSNorm)
            return q_norm, k_norm
        end_of_q = self._num_heads * self._head_dim
        end_of_k = end_of_q + self._num_kv_heads * self._head_dim
        q_norm(qkv[:, :end_of_q])
        k_norm(qkv[:, end_of_q:end_of_k])
        return None, None


class Sinks:
    """Attention sinks (arXiv:2309.17453): a learned score of a key without a value for each query
    head of this rank, float32 [H].

    scores: options for the attention of a layer.
    """

    def __init__(self, heads: Share, device: torch.device) -> None:
        values = torch.empty(heads.count, dtype=torch.float32, device=device)
        cuts = {} if heads.is_whole else {"": Cut(0, heads)}
        self.weights = DenseWeights({"": values}, cuts=cuts)
        self.scores = ScoreOptions(sinks=values)
