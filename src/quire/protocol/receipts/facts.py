"""Facts about an engine that receipts state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["EngineFacts"]

Setting = str | int | bool | None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """All that decides the bits of an engine's answers, as it is known at its start.

    program: version, kernels and settings, by name. config: digest of the model's config. files:
    stamp of the weight files as they were loaded (`stamp_files`). unstable: reason for
    which the bits of an answer may depend on others beside it; empty if they never do.
    """

    program: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    config: str = ""
    files: str = ""
    unstable: str = "its bits were not looked at"
