"""The rows of `rms_norm`, each with a residual of other strides or of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.inputs import normal
from quire.ops.operation import Case
from quire.ops.rms_norm.inputs import make_inputs as make_norm_inputs

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for case in make_norm_inputs(generator):
        x, *rest = case.args
        residual = normal(generator, *x.shape, dtype=x.dtype)
        yield Case(label=case.label, args=(x, residual, *rest))
    heads = normal(generator, 4, 6, 32)
    weight = normal(generator, 32)
    yield Case(
        label="both are heads of a merged projection",
        args=(heads[:, :4], heads[:, 2:], weight, 1e-6),
    )
