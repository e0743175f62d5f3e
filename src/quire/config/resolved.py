"""Settings with nothing left open, in the sections that constructors take.

Each section is that of `quire.config.settings`. Fields that `resolve` chooses have narrower types
here and no default; all others are what the user set.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from quire.config.settings import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    NumericsSettings,
    RuntimeSettings,
    SchedulerSettings,
)

__all__ = [
    "ResolvedCache",
    "ResolvedModel",
    "ResolvedNumerics",
    "ResolvedRuntime",
    "ResolvedScheduler",
    "ResolvedSettings",
]


@dataclass(frozen=True, kw_only=True)
class ResolvedModel(ModelSettings):
    """max_model_len: the longest sequence that a request may need."""

    max_model_len: int = field()


@dataclass(frozen=True, kw_only=True)
class ResolvedCache(CacheSettings):
    """kv_cache_dtype: name of a torch dtype. num_host_blocks: blocks that `swap_space` holds.
    num_state_checkpoints: 0 for models without recurrent states."""

    kv_cache_dtype: str = field()
    block_size: int = field()
    num_kv_blocks: int = field()
    num_host_blocks: int = 0
    num_state_checkpoints: int = 0


@dataclass(frozen=True, kw_only=True)
class ResolvedScheduler(SchedulerSettings):
    """long_prefill_token_threshold, max_num_partial_prefills, max_long_partial_prefills: None is no
    limit."""

    max_num_seqs: int = field()
    max_num_batched_tokens: int = field()


@dataclass(frozen=True, kw_only=True)
class ResolvedRuntime(RuntimeSettings):
    """device: "cpu" or "cuda". attention_backend None: the best that serves; linear_isa,
    attention_isa None: the processor's flags decide, or this is no CPU."""

    device: str = field()
    num_threads: int = field()


@dataclass(frozen=True, kw_only=True)
class ResolvedNumerics(NumericsSettings):
    """dtype: name of a torch dtype. quantization None: matrices stay in dtype. activation_bits: 16
    also where no matrix is integers."""

    dtype: str = field()
    activation_bits: int = field()


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(
    ResolvedNumerics, ResolvedRuntime, ResolvedScheduler, ResolvedCache, ResolvedModel
):
    """All sections in one; code that takes a section accepts this too."""

    @classmethod
    def of(cls, settings: EngineSettings, **chosen: Any) -> ResolvedSettings:
        """The settings as they are, but for those that were chosen, by name."""
        given = {item.name: getattr(settings, item.name) for item in fields(settings)}
        return cls(**{**given, **chosen})
