"""The rows of `layer_norm`, each with a residual of other strides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.inputs import normal
from quire.ops.layer_norm.inputs import make_inputs as make_norm_inputs
from quire.ops.operation import Case

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for case in make_norm_inputs(generator):
        x, *rest = case.args
        residual = normal(generator, *x.shape, dtype=x.dtype)
        yield Case(label=case.label, args=(x, residual, *rest))
