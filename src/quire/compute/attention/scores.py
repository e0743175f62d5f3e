"""Options of a layer's attention scores, besides scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.ops.attention.paged_attention.key_bias import KeyBias

__all__ = ["PLAIN_SCORES", "ScoreOptions"]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    """Options of scores, as `quire.ops.attention.paged_attention` takes them by the same names."""

    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    key_bias: KeyBias | None = None
    value_bias: torch.Tensor | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that are not None, by name."""
        found: dict[str, Any] = {}
        if self.soft_cap is not None:
            found["soft_cap"] = self.soft_cap
        if self.alibi_slopes is not None:
            found["alibi_slopes"] = self.alibi_slopes
        if self.sinks is not None:
            found["sinks"] = self.sinks
        if self.key_bias is not None:
            found["key_bias"] = self.key_bias
        if self.value_bias is not None:
            found["value_bias"] = self.value_bias
        return found


PLAIN_SCORES = ScoreOptions()
