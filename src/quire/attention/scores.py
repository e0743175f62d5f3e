"""What a layer does to its scores besides scaling them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["PLAIN_SCORES", "ScoreOptions"]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    """Meaning and shapes as of the arguments of the same names of `quire.ops.paged_attention`."""

    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def given(self) -> dict[str, Any]:
        """Those that are not None, by name."""
        found: dict[str, Any] = {}
        if self.soft_cap is not None:
            found["soft_cap"] = self.soft_cap
        if self.alibi_slopes is not None:
            found["alibi_slopes"] = self.alibi_slopes
        if self.sinks is not None:
            found["sinks"] = self.sinks
        return found


PLAIN_SCORES = ScoreOptions()
