"""Repeated and distinct ids of both widths, with and without an offset, rows of odd sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for ids_dtype in (torch.int32, torch.int64):
            for width, offset in ((24, 0), (769, 2), (3, -4)):
                table = normal(generator, 11, width, dtype=dtype)
                ids = torch.tensor([0, 10, 3, 3, 9], dtype=ids_dtype).clamp(-offset, 10 - offset)
                label = f"{dtype}, {ids_dtype} ids + {offset}, rows of {width}"
                yield Case(label=label, args=(ids, table, offset))
        ids = torch.randint(11, (40,), generator=generator)[::2]
        yield Case(label=f"{dtype}, ids with a stride", args=(ids, table))
