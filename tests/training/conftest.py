from __future__ import annotations

from tests.small_engines import forked_ranks, kernels_by_flags

__all__ = ["forked_ranks", "kernels_by_flags"]
