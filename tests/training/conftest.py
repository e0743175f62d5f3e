from __future__ import annotations

from tests.quick_starts import quick_starts
from tests.small_engines import kernels_by_flags

__all__ = ["kernels_by_flags", "quick_starts"]
