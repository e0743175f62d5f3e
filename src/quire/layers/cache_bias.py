"""Biases of K and V outside an int8 cache.

A head of a token has 255 steps between its extremes: a large constant in a few dims, as Qwen2 has
on K, leaves few to the rest. Attention adds it where it reads
(`quire.ops.attention.paged_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.attention import PLAIN_SCORES, ScoreOptions
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.ops import PackedMatrix
from quire.ops.attention.paged_attention.key_bias import KeyBias
from quire.quantization import StoredMatrix, WeightFormat, numbers_of

__all__ = ["CacheBiases", "WithoutBiases"]

DEVIATIONS = 3.0
"""Expected largest value of a head's 64 to 256 dims, in standard deviations."""

GROWTH = 1.25
"""Factor by which a bias that stays may raise that value. A larger factor lets more pairs stay,
which takes attention less time: prompts take 1.1 times as long with 8 of 64, 1.8 times with all
(measured)."""


class CacheBiases:
    """Takes the biases out of one layer's projections, and says what attention adds.

    heads: number of query heads, of kv heads, and head_dim. rotary: None where K is not rotated;
    then q·b is the same for every key, and softmax drops it. scores: the layer's other options.
    keys_normed: a norm follows K's bias, which stays then. added: whether the backend adds biases;
    if not, only what softmax drops is taken.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        rotary: RotaryEmbedding | None,
        scores: ScoreOptions = PLAIN_SCORES,
        *,
        keys_normed: bool,
        added: bool,
    ) -> None:
        self.scores = scores
        self._heads = heads
        self._rotary = rotary
        self._takes_constant = not keys_normed and scores.soft_cap is None and scores.sinks is None
        self._takes_rotated = not keys_normed and added
        self._takes_values = added and scores.sinks is None

    def take(
        self,
        parts: Sequence[StoredMatrix | torch.Tensor],
        bias: torch.Tensor,
        norm: RMSNorm | LayerNorm,
    ) -> torch.Tensor:
        """The bias without what the cache does without. parts, one below the other
        [(H + 2K)·D, I], and bias [(H + 2K)·D] of the merged projection; norm: of its input."""
        num_heads, num_kv_heads, head_dim = self._heads
        bias = bias.clone()
        rows = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        _, keys, values = (part.view(-1, head_dim) for part in bias.split(rows))
        half = 0 if self._rotary is None else self._rotary.cos.shape[1]
        if self._takes_constant:
            keys[:, 2 * half :] = 0
        if self._takes_rotated and self._rotary is not None:
            deviation = _deviation(numbers_of(parts, rows[0], rows[0] + rows[1]), norm)
            self._take_rotated(keys, deviation, self._rotary)
        if self._takes_values and values.any():
            self.scores = replace(self.scores, value_bias=values.to(torch.float32, copy=True))
            values.zero_()
        return bias

    def _take_rotated(
        self, keys: torch.Tensor, deviation: torch.Tensor | None, rotary: RotaryEmbedding
    ) -> None:
        """keys: the bias [K, D], changed in place. deviation: expected of K [K, D], if known."""
        half = rotary.cos.shape[1]
        values = torch.stack((keys[:, :half], keys[:, half : 2 * half]), dim=-1).float()
        pairs = _large_pairs(values, deviation).to(torch.int32)
        if len(pairs) == 0:
            return
        chosen = pairs.long()
        key_bias = KeyBias(pairs, values[:, chosen].contiguous(), *rotary.by_pair)
        self.scores = replace(self.scores, key_bias=key_bias)
        keys[:, chosen] = 0
        keys[:, chosen + half] = 0


class WithoutBiases:
    """`WeightFormat` of a merged projection whose biases the cache does without."""

    def __init__(
        self, weight_format: WeightFormat, biases: CacheBiases, norm: RMSNorm | LayerNorm
    ) -> None:
        self._format = weight_format
        self._biases = biases
        self._norm = norm

    @property
    def keeps_stored(self) -> bool:
        return self._format.keeps_stored

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        if bias is not None:
            bias = self._biases.take((weight,), bias, self._norm)
        return self._format.pack(weight, bias, gate=gate)

    def keep(
        self,
        parts: Sequence[StoredMatrix | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gate: str | None = None,
    ) -> PackedMatrix:
        if bias is not None:
            bias = self._biases.take(parts, bias, self._norm)
        return self._format.keep(parts, bias, dtype, gate=gate)


def _deviation(keys: torch.Tensor, norm: RMSNorm | LayerNorm) -> torch.Tensor | None:
    """The standard deviation of rows [K·D, I] times a normed input, float32 [K·D]; None if the norm
    comes later in the files."""
    if norm.weight is None:
        return keys.float().norm(dim=1)
    return (keys.float() * norm.weight.float()).norm(dim=1) if norm.weights.is_loaded else None


def _large_pairs(values: torch.Tensor, deviation: torch.Tensor | None) -> torch.Tensor:
    """values [K, R/2, 2] → the pairs whose bias takes steps from others in any head, [N]. All that
    have any, if deviations [K·D] are not known."""
    size = values.norm(dim=-1)  # rotation may bring all of it to one dim
    if deviation is None:
        return (size > 0).any(0).nonzero().flatten()
    of_head = deviation.view(len(values), -1)
    half = size.shape[1]
    of_pair = torch.maximum(of_head[:, :half], of_head[:, half : 2 * half])
    natural = DEVIATIONS * of_head.amax(1, keepdim=True)
    return (size + DEVIATIONS * of_pair > GROWTH * natural).any(0).nonzero().flatten()
