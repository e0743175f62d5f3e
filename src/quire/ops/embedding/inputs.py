"""Repeated and distinct ids."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.inputs import DTYPES, normal
from quire.ops.operation import Case

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for dtype in DTYPES:
        table = normal(generator, 11, 24, dtype=dtype)
        yield Case(label=str(dtype), args=(torch.tensor([0, 10, 3, 3]), table))
