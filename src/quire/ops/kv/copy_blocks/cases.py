"""Copies within a small pool; some sources are destinations of other copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for src, dst in (([0], [5]), ([0, 0, 3], [1, 2, 4]), ([0, 1, 2], [1, 2, 0]), ([], [])):
            pages = normal(generator, 6, 6, 4, 2, 10, dtype=dtype)
            yield Case(
                label=f"{dtype}, {src} to {dst}",
                args=(
                    pages,
                    torch.tensor(src, dtype=torch.int64),
                    torch.tensor(dst, dtype=torch.int64),
                ),
            )
