"""Whole and partial rotations of both pairings, on views of a merged projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.inputs import DTYPES, normal
from quire.ops.operation import Case

__all__ = ["make_inputs"]

_MAX_POSITION = 50


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for dtype in DTYPES:
        for head_dim, rotary_dim in ((128, 128), (80, 32), (40, 36)):
            for interleaved in (False, True):
                fused = normal(generator, 9, 5, head_dim, dtype=dtype)
                angle = normal(generator, _MAX_POSITION, rotary_dim // 2)
                positions = torch.randint(0, _MAX_POSITION, (9,), generator=generator)
                yield Case(
                    label=f"{dtype}, {rotary_dim} of {head_dim}, interleaved={interleaved}",
                    args=(fused[:, :3], fused[:, 3:], positions, angle.cos(), angle.sin()),
                    kwargs={"interleaved": interleaved},
                )
