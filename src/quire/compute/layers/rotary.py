"""Rotary position embedding: tables of cos and sin by position, for every kind of scaling.

Frequencies are computed in float32 in the order of the published implementations, because the
models were trained with that rounding. A row of a table depends on its position alone, never on the
batch or the length of a sequence, so K stays valid once written.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from quire.config.rope import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from quire.ops.attention.paged_attention.key_bias import angle_table

__all__ = ["Rotaries", "RotaryEmbedding", "rope_tables"]


class RotaryEmbedding:
    """Rotation of q and k by their positions (Su et al. 2021, section 3.4.2).

    cos, sin: float32 [max_positions, rotary_dim / 2]; positions must be below max_positions.
    has_axes: tokens may have three positions.
    """

    def __init__(self, rope: RopeSpec, max_positions: int, device: torch.device) -> None:
        cos, sin = rope_tables(rope, max_positions)
        self.cos, self.sin = cos.to(device), sin.to(device)
        self.has_axes = bool(rope.axes)
        self._axes = torch.tensor(rope.axes or (0,) * cos.shape[1], device=device)
        self._pairs = torch.arange(cos.shape[1], device=device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return positions [T], cos and sin that rotate tokens at these positions: [T], or [3, T]
        on three axes. Text has equal positions on all three, which is the same as one."""
        if positions.dim() == 1:
            return positions, self.cos, self.sin
        where = positions[self._axes].t().contiguous()  # per token and pair, like the result
        own = torch.arange(positions.shape[1], device=positions.device)
        return own, self.cos[where, self._pairs], self.sin[where, self._pairs]

    @cached_property
    def by_pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin in the form of `KeyBias`; made only if a layer asks."""
        return angle_table(self.cos), angle_table(self.sin)


class Rotaries:
    """Embeddings of a model; layers with the same rope share one pair of tables."""

    def __init__(self, max_positions: int, device: torch.device) -> None:
        self._max_positions, self._device = max_positions, device
        self._made: dict[RopeSpec, RotaryEmbedding] = {}

    def of(self, rope: RopeSpec) -> RotaryEmbedding:
        """Return the embedding of a rope, made once."""
        if rope not in self._made:
            self._made[rope] = RotaryEmbedding(rope, self._max_positions, self._device)
        return self._made[rope]


def rope_tables(rope: RopeSpec, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, float32 [max_positions, rotary_dim / 2].

    Dynamic NTK: position p uses the base of a sequence of length p + 1, as `transformers` does when
    it decodes one token at a time; within the trained length it is plain rope. LongRoPE: the long
    factors if max_positions exceeds the trained length, else the short ones, for all positions; a
    sequence never mixes the two.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    attention_factor = 1.0
    match rope.scaling:
        case None:
            frequencies = _frequencies(rope)
        case LinearScaling(factor):
            frequencies = _frequencies(rope) / factor
        case DynamicNTKScaling() as scaling:
            frequencies = _dynamic_ntk(rope, scaling, positions)
        case Llama3Scaling() as scaling:
            frequencies = _llama3(rope, scaling)
        case ProportionalScaling(share, factor):
            frequencies = _frequencies(rope) / factor
            frequencies[int(share * rope.rotary_dim // 2) :] = 0.0
        case YarnScaling() as scaling:
            frequencies = _yarn(rope, scaling)
            attention_factor = scaling.attention_factor
        case LongRopeScaling() as scaling:
            is_long = max_positions > scaling.original_max_positions
            divisors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor)
            frequencies = 1.0 / (divisors * rope.theta ** _exponents(rope))
            attention_factor = scaling.attention_factor
            if is_long and scaling.long_attention_factor is not None:
                attention_factor = scaling.long_attention_factor
    angles = positions[:, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def _exponents(rope: RopeSpec) -> torch.Tensor:
    """2i / R for the pairs i of the R rotated elements, [R/2]."""
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim


def _frequencies(rope: RopeSpec) -> torch.Tensor:
    """theta^(-2i/R), radians per position, [R/2]."""
    return 1.0 / (rope.theta ** _exponents(rope))


def _dynamic_ntk(
    rope: RopeSpec, scaling: DynamicNTKScaling, positions: torch.Tensor
) -> torch.Tensor:
    """Return frequencies by position, [P, R/2]; the base grows with the length beyond the trained
    one."""
    length = (positions + 1).clamp(min=scaling.original_max_positions)
    stretch = scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1)
    power = rope.rotary_dim / (rope.rotary_dim - 2)
    base = rope.theta * stretch**power
    return 1.0 / (base[:, None] ** _exponents(rope))


def _llama3(rope: RopeSpec, scaling: Llama3Scaling) -> torch.Tensor:
    """Stretch wavelengths beyond the trained length / low_freq_factor by the factor, keep those
    below the trained length / high_freq_factor, and blend linearly between them."""
    frequencies = _frequencies(rope)
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _yarn(rope: RopeSpec, scaling: YarnScaling) -> torch.Tensor:
    """YaRN, section 3.2: keep pairs that turn more than beta_fast times within the trained length,
    interpolate those below beta_slow, and blend linearly between them."""
    frequencies = _frequencies(rope)
    first, last = (
        _pair_that_turns(rope, scaling.original_max_positions, turns)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first or 0.001  # as in the published code: a ramp of width 0 is a step
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    interpolate = ((pairs - first) / width).clamp(0.0, 1.0)
    return frequencies / scaling.factor * interpolate + frequencies * (1 - interpolate)


def _pair_that_turns(rope: RopeSpec, length: int, turns: float) -> float:
    """Index of the pair that makes `turns` full turns within `length` positions."""
    period = length / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(period) / (2 * math.log(rope.theta))
