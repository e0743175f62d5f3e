"""Settings of positions in the metadata of GGUF files, by the names of config.json."""

from __future__ import annotations

import math
import struct
from typing import Any

from quire.base.errors import ConfigError
from quire.config.families.gguf_names import GGUFNames
from quire.config.gguf.header import GGUFHeader, float32
from quire.config.hf import RawConfig

__all__ = [
    "axes_of",
    "not_served",
    "refuse_unread_ropes",
    "rope_divisors",
    "scaling_beside",
    "scaling_of",
]

_MAX_DIVISORS = 1 << 16

_SCALING_KINDS = ("none", "linear", "yarn", "longrope")
_AXES_IN_BLOCKS = ("qwen2vl",)
"""Architectures in which pairs of one axis lie together."""

_SLIDING_UNSCALED = ("gemma3",)
"""Architectures whose sliding layers would be scaled by attn_factor alone."""

_READ_ROPES = frozenset((
    "dimension_count", "freq_base", "scale_linear", "scaling.attn_factor", "scaling.factor",
    "scaling.original_context_length", "scaling.type", "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow", "scaling.yarn_ext_factor",
))  # fmt: skip
"""Settings under "rope." that are obeyed, or refused where they are read, in all files."""


def axes_of(header: GGUFHeader, name: str, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `scaling` with the pairs of each axis of positions, in files that state them."""
    sections = header.array(f"{name}.rope.dimension_sections")
    if sections is None or not any(sections):
        return scaling
    used = sections[:3] if not any(sections[3:]) else sections
    axes = {"mrope_section": used, "mrope_interleaved": name not in _AXES_IN_BLOCKS}
    return {**(scaling or {"rope_type": "default"}), **axes}


def scaling_of(
    header: GGUFHeader, name: str, raw: RawConfig, rotary_dim: Any
) -> dict[str, Any] | None:
    """Changes of the frequencies, as llama.cpp has them: a kind that is not stated is linear, a
    factor divides beside divisors too, and attn_factor multiplies whatever the kind."""
    kind, factor = _stretch(header, name)
    stated = float32(header.value(f"{name}.rope.scaling.attn_factor"))
    divisors = rope_divisors(header, "rope_freqs.weight")
    short, long = (rope_divisors(header, f"rope_factors_{n}.weight") for n in ("short", "long"))
    if (short is None) != (long is None):
        raise ConfigError(
            f"{header.file}: has one of rope_factors_short.weight and rope_factors_long.weight; "
            "fetch the file again"
        )
    original = header.value(f"{name}.rope.scaling.original_context_length")
    if kind == "yarn" and (divisors or short):
        raise not_served(header, f"{name}.rope.scaling.type", kind, "beside divisors of its own")
    if divisors is not None or (short is not None and long is not None):
        return {
            "rope_type": "longrope",
            "short_factor": [each * factor for each in divisors or short or ()],
            "long_factor": [each * factor for each in divisors or long or ()],
            "attention_factor": 1.0 if divisors and stated is None else stated,
            "original_max_position_embeddings": raw.read_optional(int, "max_position_embeddings")
            if divisors
            else original,
        }
    if kind == "yarn":
        return _yarn(header, name, factor, original) | ({"attn_factor": stated} if stated else {})
    if stated in (None, 1.0):
        return None if factor == 1.0 else {"rope_type": kind, "factor": factor}
    if kind != "linear" or not isinstance(rotary_dim, int) or name in _SLIDING_UNSCALED:
        raise not_served(header, f"{name}.rope.scaling.attn_factor", stated, f"with {kind!r}")
    same = [factor] * (rotary_dim // 2)
    context = raw.read_optional(int, "max_position_embeddings")
    return {
        "rope_type": "longrope",
        "short_factor": same,
        "long_factor": same,
        "attention_factor": stated,
        "original_max_position_embeddings": context,
    }


def _stretch(header: GGUFHeader, name: str) -> tuple[str, float]:
    """Return the kind of scaling, "linear" if there is none, and its factor."""
    start = f"{name}.rope.scaling"
    kind = header.string(f"{start}.type") or "linear"
    if kind not in _SCALING_KINDS:
        raise not_served(header, f"{start}.type", kind, "is no kind of scaling")
    keys = (f"{start}.factor", f"{name}.rope.scale_linear")
    key = next((key for key in keys if key in header.metadata), keys[0])
    raw = RawConfig(header.metadata, str(header.file))
    factor = float32(raw.read(float, key, default=0.0)) or 1.0
    if factor < 1.0:
        raise not_served(header, key, factor, "is below 1")
    ramp = raw.read(float, f"{start}.yarn_ext_factor", default=-1.0)
    if ramp >= 0 and ramp != float(kind == "yarn"):
        if ramp or kind != "yarn":
            raise not_served(header, f"{start}.yarn_ext_factor", ramp, f"with {kind!r}")
        kind = "linear"
    return ("linear", 1.0) if kind == "none" else (kind, factor)


def scaling_beside(header: GGUFHeader, name: str) -> tuple[str, object] | None:
    """The setting that scales frequencies beside `rope_freqs.weight`, with its value."""
    kind, factor = _stretch(header, name)
    key = f"{name}.rope.scaling.attn_factor"
    stated = header.metadata.get(key)
    if stated not in (None, 1.0):
        return key, stated
    plain = kind in ("linear", "longrope") and factor == 1.0
    return None if plain else (f"{name}.rope.scaling.factor", factor)


def _yarn(header: GGUFHeader, name: str, factor: float, original: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original:
        found["original_max_position_embeddings"] = original
    for end in ("beta_fast", "beta_slow"):
        stated = header.metadata.get(f"{name}.rope.scaling.yarn_{end}")
        if stated is not None:
            found[end] = float32(stated)
    return found


def refuse_unread_ropes(header: GGUFHeader, names: GGUFNames, head_dim: Any) -> None:
    """Raise ConfigError for settings of positions that nothing here obeys, unless their value
    changes nothing."""
    name = names.name
    start = f"{name}.rope."
    base = header.metadata.get(f"{start}freq_base")
    harmless: dict[str, tuple[Any, ...]] = {
        "dimension_count_swa": (head_dim, header.metadata.get(f"{start}dimension_count")),
        "dimension_sections": (0,),
        "freq_base_swa": (base,),
        "scaling.alpha": (0.0, 1.0),
        # llama.cpp takes positions from Granite by this key
        "scaling.finetuned": (True,) if name in ("granite", "granitemoe") else (True, False),
        "scaling.yarn_attn_factor": (1.0,),
        "scaling.yarn_log_multiplier": (0.0,),
    }
    read = _READ_ROPES | set(names.ropes)
    for key in (*header.metadata, *header.arrays):
        part = key.removeprefix(start)
        if not key.startswith(start) or part in read:
            continue
        values = header.array(key) if key in header.arrays else [header.metadata[key]]
        for value in values or ():
            if value not in harmless.get(part, ()):
                raise not_served(header, key, value, "turns heads in a way of its own")


def not_served(header: GGUFHeader, key: str, value: object, why: str) -> ConfigError:
    return ConfigError(
        f"{header.file}: {key}={value!r} {why}, which quire does not serve; take the model's "
        "Hugging Face folder"
    )


def rope_divisors(header: GGUFHeader, name: str) -> list[float] | None:
    """Divisors of the frequencies, which files of Llama 3 and Phi-3 have as tensors."""
    entry = header.tensors.get(name)
    if entry is None:
        return None
    if entry.kind.name != "F32" or len(entry.shape) != 1 or entry.shape[0] > _MAX_DIVISORS:
        raise ConfigError(
            f"{header.file}: {name} of type {entry.kind.name} and shape "
            f"{list(entry.shape)} is no list of float32 numbers, one per pair of a head"
        )
    try:
        with entry.file.open("rb") as file:
            file.seek(entry.start)
            data = file.read(entry.end - entry.start)
    except OSError as error:
        raise ConfigError(f"{entry.file}: cannot be read ({error.strerror})") from error
    values = list(struct.unpack(f"<{entry.shape[0]}f", data))
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ConfigError(f"{header.file}: {name} holds a number that is not positive")
    return values
