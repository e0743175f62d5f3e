"""Rotary position embedding of a model's layers, and the reader of all its spellings.

transformers 5 writes `rope_parameters` (flat, or one object per layer type); older files have
`rope_theta` with `rope_scaling`, whose type is under `rope_type` or `type`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.config.hf import RawConfig

__all__ = [
    "DynamicNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "ProportionalScaling",
    "RopeScaling",
    "RopeSpec",
    "YarnScaling",
    "extended_context",
    "read_ropes",
    "yarn_temperature",
]

ROPE_TYPES = ("default", "mrope", "linear", "dynamic", "llama3", "yarn", "longrope", "su")
DEFAULT_THETA = 10000.0
_INTERLEAVED = ("qwen3_vl_text", "qwen3_5_text", "qwen3_5_moe_text")
"""Models with axes that take turns whatever the file says of it."""

_MAX_FACTOR = 1e6
"""No published model is stretched that far."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, "Position Interpolation", section 2.3)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicNTKScaling:
    """Base grown with the length beyond `original_max_positions` (bloc97, emozilla 2023)."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1 release)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """NTK by parts plus a temperature (Peng et al. 2023, "YaRN", sections 3.2 to 3.4).

    attention_factor: multiplies cos and sin. truncate: whether the ramp's ends are rounded.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """One divisor per frequency, a short and a long set (Ding et al. 2024, "LongRoPE").

    attention_factor: factor on cos and sin; long_attention_factor: factor for the long set, if it
    is another.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float
    long_attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The first `share` of the pairs turn, as slowly as among all of them, by 1 / `factor` (Gemma
    4)."""

    share: float
    factor: float = 1.0


RopeScaling = (
    LinearScaling
    | DynamicNTKScaling
    | Llama3Scaling
    | YarnScaling
    | LongRopeScaling
    | ProportionalScaling
)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of one layer (Su et al. 2021, "RoFormer", section 3.2).

    rotary_dim: leading elements of a head that are rotated, even, at most head_dim.
    scaling: None for plain rope. axes: index of the token position, out of three, that turns each
    pair of elements (Wang et al. 2024, "Qwen2-VL", section 2.1, M-RoPE); empty: one position.
    """

    rotary_dim: int
    theta: float
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()


def read_ropes(
    raw: RawConfig,
    layer_types: Sequence[str],
    head_dim: int,
    max_positions: int,
    theta: float = DEFAULT_THETA,
) -> tuple[RopeSpec, ...]:
    """Return the rope of each layer. layer_types: key of a nested `rope_parameters` for each layer.
    theta: default where the file states none.

    Raises ConfigError for an unknown type or an inconsistent value.
    """
    section = raw.section("rope_parameters") or raw.section("rope_scaling")
    by_type: dict[str, RopeSpec] = {}
    for kind in dict.fromkeys(layer_types):
        nested = section.section(kind) if section is not None else None
        if nested is None and section is not None and _is_nested(section, layer_types):
            raise ConfigError(f"{section.source}: no entry for layer type {kind!r}; add one")
        by_type[kind] = _read_rope(raw, nested or section, head_dim, max_positions, theta)
    return tuple(by_type[kind] for kind in layer_types)


def extended_context(rope: RopeSpec, max_positions: int) -> int:
    """Longest context in tokens: `max_position_embeddings`, stretched where the file gives the
    trained length and the factor separately (linear, dynamic, YaRN)."""
    match rope.scaling:
        case LinearScaling(factor) | DynamicNTKScaling(factor, _):
            return int(max_positions * factor)
        case YarnScaling(factor, original):
            return max(max_positions, int(original * factor))
        case _:
            return max_positions


def _is_nested(section: RawConfig, layer_types: Sequence[str]) -> bool:
    return any(section.section(kind) is not None for kind in set(layer_types))


def _read_rope(
    raw: RawConfig,
    section: RawConfig | None,
    head_dim: int,
    max_positions: int,
    default_theta: float,
) -> RopeSpec:
    here = section or raw
    theta = raw.read(float, "rope_theta", default=default_theta)
    theta = here.read(float, "rope_theta", default=theta)
    partial = raw.read(float, "partial_rotary_factor", default=1.0)
    partial = here.read(float, "partial_rotary_factor", default=partial)
    rotary_dim = int(head_dim * partial) if 0 < partial <= 1 else 0
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(
            f"{here.source}: partial_rotary_factor={partial} of head_dim={head_dim} rotates "
            f"{rotary_dim} elements; it must be an even number from 2 to head_dim"
        )
    if theta <= 0:
        raise ConfigError(f"{here.source}: rope_theta={theta} must be positive")
    if section is None:
        return RopeSpec(rotary_dim, theta)
    scaling = _read_scaling(raw, section, rotary_dim, max_positions)
    takes_turns = raw.read_optional(str, "model_type") in _INTERLEAVED
    return RopeSpec(rotary_dim, theta, scaling, _read_axes(section, rotary_dim, takes_turns))


def _read_axes(section: RawConfig, rotary_dim: int, takes_turns: bool) -> tuple[int, ...]:
    """The axis of each pair, by the number of pairs of each of three axes. takes_turns: whether
    axes take turns whatever the file says. Rows and columns then have every third pair, as far as
    their numbers reach, and the first axis has the others."""
    if not section.has("mrope_section"):
        return ()
    counts = section.read_list(int, "mrope_section")
    if counts is None or len(counts) != 3 or min(counts) < 0 or sum(counts) != rotary_dim // 2:
        raise ConfigError(
            f"{section.source}: mrope_section={counts} must be three numbers of pairs, "
            f"{rotary_dim // 2} in all"
        )
    if not (takes_turns or section.read(bool, "mrope_interleaved", default=False)):
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    turns = ((pair, pair % 3) for pair in range(rotary_dim // 2))
    return tuple(axis if pair < 3 * counts[axis] else 0 for pair, axis in turns)


def _read_scaling(
    raw: RawConfig, section: RawConfig, rotary_dim: int, max_positions: int
) -> RopeScaling | None:
    kind = section.read_choice(ROPE_TYPES, "rope_type", "type", default="default")
    # Phi-3 states the trained length beside the section; that one wins, as in transformers.
    here = raw if raw.has("original_max_position_embeddings") else section
    original = here.read_size("original_max_position_embeddings", default=max_positions)
    match kind:
        case "linear":
            return LinearScaling(_read_factor(section))
        case "dynamic":
            if rotary_dim == 2:
                raise ConfigError(
                    f"{section.source}: dynamic rope needs more than 2 rotary elements"
                )
            return DynamicNTKScaling(_read_factor(section), max_positions)
        case "llama3":
            return Llama3Scaling(
                factor=_read_factor(section),
                low_freq_factor=section.read(float, "low_freq_factor"),
                high_freq_factor=section.read(float, "high_freq_factor"),
                original_max_positions=original,
            )
        case "yarn":
            return _read_yarn(section, original, max_positions)
        case "longrope" | "su":
            return _read_longrope(section, original, rotary_dim, max_positions)
        case _:
            return None


def _read_factor(section: RawConfig, default: float | None = None) -> float:
    if default is not None and not section.has("factor"):
        return default
    factor = section.read(float, "factor")
    if not 1.0 <= factor <= _MAX_FACTOR:
        raise ConfigError(
            f"{section.source}: factor={factor} must be at least 1, and at most {_MAX_FACTOR:g}"
        )
    return factor


def _read_yarn(section: RawConfig, original: int, max_positions: int) -> YarnScaling:
    factor = _read_factor(section, default=max_positions / original)
    mscale = section.read(float, "mscale", default=0.0)
    mscale_all_dim = section.read(float, "mscale_all_dim", default=0.0)
    attention_factor = section.read_optional(float, "attention_factor")
    if attention_factor is None:
        attention_factor = yarn_temperature(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = yarn_temperature(factor, mscale)
            attention_factor /= yarn_temperature(factor, mscale_all_dim)
        # vLLM multiplies, transformers ignores it; DeepSeek-R1-0528-Qwen3-8B undoes the scale so
        attention_factor *= section.read(float, "attn_factor", default=1.0)
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        attention_factor=attention_factor,
        beta_fast=section.read(float, "beta_fast", default=32.0),
        beta_slow=section.read(float, "beta_slow", default=1.0),
        truncate=section.read(bool, "truncate", default=True),
    )


def yarn_temperature(factor: float, mscale: float) -> float:
    """sqrt(1/t) of YaRN, equation 22; `mscale` weighs the logarithm (DeepSeek-V2)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(
    section: RawConfig, original: int, rotary_dim: int, max_positions: int
) -> LongRopeScaling:
    factors: dict[str, tuple[float, ...]] = {}
    for key in ("short_factor", "long_factor"):
        values = section.read_list(float, key)
        if values is None or len(values) != rotary_dim // 2:
            found = "nothing" if values is None else f"{len(values)} numbers"
            raise ConfigError(
                f"{section.source}: {key} holds {found}; "
                f"longrope needs rotary_dim / 2 = {rotary_dim // 2} numbers"
            )
        if min(values) <= 0:
            raise ConfigError(f"{section.source}: {key} holds {min(values)}; all must be positive")
        factors[key] = values
    if original < 2:
        raise ConfigError(
            f"{section.source}: original_max_position_embeddings={original} must be above 1"
        )
    factor = _read_factor(section, default=max_positions / original)
    attention_factor = section.read_optional(float, "attention_factor")
    by_set = [section.read_optional(float, f"{kind}_mscale") for kind in ("short", "long")]
    if None not in by_set:  # Phi-3.5-MoE
        attention_factor = by_set[0]
    if attention_factor is None:
        # LongRoPE, section 3.3; as in the Phi-3 release
        stretch = math.log(factor) / math.log(original) if factor > 1.0 else 0.0
        attention_factor = math.sqrt(1.0 + stretch)
    return LongRopeScaling(
        long_attention_factor=None if None in by_set else by_set[1],
        short_factor=factors["short_factor"],
        long_factor=factors["long_factor"],
        original_max_positions=original,
        attention_factor=attention_factor,
    )
