"""Attention over the paged cache: everything between the qkv projection and the output one."""

from __future__ import annotations

import torch

from quire.attention import AttentionBackend, StepInputs
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.ops import OpSet

__all__ = ["Attention"]


class Attention:
    """Norms and rotates the heads where the model does, writes K/V, attends to the cache.

    layer: model layer index, which picks the plane and the group of the KV pool. scale: on q·k.
    q_norm, k_norm: norms over a head (Qwen3), or None. rotary: None with learned positions.
    """

    def __init__(
        self,
        ops: OpSet,
        backend: AttentionBackend,
        layer: int,
        heads: tuple[int, int, int],
        scale: float,
        rotary: RotaryEmbedding | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        """heads: number of query heads, of kv heads, and head_dim."""
        self._write_kv = ops.write_kv
        self._backend = backend
        self._layer = layer
        self._num_heads, self._num_kv_heads, self._head_dim = heads
        self._scale = scale
        self._rotary = rotary
        self.q_norm, self.k_norm = q_norm, k_norm

    def __call__(
        self, qkv: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """qkv [T, (H + 2K)·D], positions [T] → [T, H·D]."""
        q, k, v = self._split(qkv)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self._rotary is not None:
            self._rotary(q, k, positions)
        k_cache, v_cache = step.kv.layers[self._layer]
        group = step.groups[step.kv.groups[self._layer]]
        self._write_kv(k, v, k_cache, v_cache, group.slot_mapping)
        out = self._backend.run(q, k_cache, v_cache, self._scale, step, group)
        return out.flatten(1)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of q [T, H, D], k and v [T, K, D]."""
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        q, k, v = heads.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
        return q, k, v
