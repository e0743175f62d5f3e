"""Sets of processor flags that we know, and the means to pretend one of them, so that no processor
is the first to find a red test.

A pretended processor lacks flags that the real one has, in every process that a test starts. Zen 4
and Xeons with AVX512_BF16 have the same flags; what their vendor changes is in
`tests/ops/test_linear_vendor.py`.
"""

from __future__ import annotations

from types import MappingProxyType

import pytest

from quire.base.platform import CpuFacts
from quire.base.platform.cpu import HIDDEN_FLAGS_VARIABLE
from quire.config.env import KERNEL_FLAGS
from quire.ops.compile import ISAS

__all__ = ["PROCESSORS", "on_each_processor", "pretend_processor"]

PROCESSORS = MappingProxyType({isa.name: frozenset(isa.all_features) for isa in reversed(ISAS)})
"""Flags by the widest instruction set of a processor, narrowest processor first."""

on_each_processor = pytest.mark.parametrize("processor", PROCESSORS)


def pretend_processor(processor: str, real: CpuFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the flags that `processor` lacks. Skips where `real` lacks some that it has."""
    flags = PROCESSORS[processor]
    missing = sorted(flags - real.features)
    if missing:
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    monkeypatch.setenv(HIDDEN_FLAGS_VARIABLE, ",".join(sorted(set(KERNEL_FLAGS) - flags)))
