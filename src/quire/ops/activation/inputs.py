"""Every activation on values of all magnitudes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.activation.reference import ACTIVATIONS
from quire.ops.inputs import DTYPES, normal
from quire.ops.operation import Case

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for dtype in DTYPES:
        for kind in ACTIVATIONS:
            x = normal(generator, 3, 37, dtype=dtype)
            x[0] *= 30
            yield Case(label=f"{dtype}, {kind}", args=(x, kind))
