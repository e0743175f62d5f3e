"""Takes biases of K and V out of an int8 cache.

Quantization divides the range of a head of a token into 255 steps. A large constant in a few dims,
such as Qwen2's bias on K, leaves few steps to the other dims. Attention adds the biases where it
reads (`quire.ops.attention.paged_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.compute.attention import PLAIN_SCORES, ScoreOptions
from quire.compute.layers.norm import LayerNorm, RMSNorm
from quire.compute.layers.rotary import RotaryEmbedding
from quire.compute.quantization import StoredMatrix, WeightFormat, numbers_of
from quire.ops import PackedMatrix
from quire.ops.attention.paged_attention.key_bias import KeyBias

__all__ = ["CacheBiases", "WithoutBiases"]

DEVIATIONS = 3.0
"""Expected largest value among a head's 64 to 256 dims, in standard deviations."""

GROWTH = 1.25
"""Factor by which a bias left in the cache may raise that value. A larger factor leaves more pairs
in, which makes attention faster: prompts take 1.1 times as long with 8 of 64 pairs taken out, 1.8
times with all (measured)."""


class CacheBiases:
    """Takes the biases out of one layer's projections, and states what attention adds.

    heads: numbers of query heads and kv heads, and head_dim. rotary: None where K is not rotated;
    q·b is then the same for every key, and softmax drops it. scores: the layer's other options.
    keys_normed: True if a norm follows K's bias, which then stays. added: True if the backend adds
    biases; otherwise only those that softmax drops are taken out.
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
        """Return the bias without the parts that are taken out. parts: matrices of the merged
        projection, stacked to [(H + 2K)·D, I]. bias: [(H + 2K)·D]. norm: norm of the projection's
        input."""
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
        """Take out what softmax drops, and large pairs. keys: the bias [K, D], changed in place.
        deviation: expected standard deviation of K [K, D], if known."""
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
    """A `WeightFormat` for a merged projection that takes biases out of the cache."""

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
    """Return the standard deviation of rows [K·D, I] times a normed input, float32 [K·D]; None if
    the norm is not loaded yet."""
    if norm.weight is None:
        return keys.float().norm(dim=1)
    return (keys.float() * norm.weight.float()).norm(dim=1) if norm.weights.is_loaded else None


def _large_pairs(values: torch.Tensor, deviation: torch.Tensor | None) -> torch.Tensor:
    """Return the rotated pairs, [N], whose bias costs other dims precision in any head.

    values: [K, R/2, 2]. If deviations [K·D] are unknown, all pairs with a bias.
    """
    size = values.norm(dim=-1)  # rotation may move all of it into one dim
    if deviation is None:
        return (size > 0).any(0).nonzero().flatten()
    of_head = deviation.view(len(values), -1)
    half = size.shape[1]
    of_pair = torch.maximum(of_head[:, :half], of_head[:, half : 2 * half])
    natural = DEVIATIONS * of_head.amax(1, keepdim=True)
    return (size + DEVIATIONS * of_pair > GROWTH * natural).any(0).nonzero().flatten()
