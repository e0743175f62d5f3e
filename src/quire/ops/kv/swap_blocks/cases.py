"""Copies from a small pool to a larger one and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for src, dst in (([0], [5]), ([3, 0, 3], [1, 2, 4]), ([], [])):
            yield Case(
                label=f"{dtype}, {src} to {dst}",
                args=(
                    normal(generator, 6, 4, 4, 2, 10, dtype=dtype),
                    normal(generator, 6, 6, 4, 2, 10, dtype=dtype),
                    torch.tensor(src, dtype=torch.int64),
                    torch.tensor(dst, dtype=torch.int64),
                ),
            )
