"""Heads of models and odd ones, within rows of other widths, few tokens and many."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]

# (heads, outputs, inputs): keys and values of DeepSeek, odd sizes.
_SHAPES = ((4, 512, 128), (3, 128, 512), (5, 33, 7), (1, 1, 1))


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for heads, outputs, inputs in _SHAPES:
            for tokens in (1, 7, 70):
                rows = normal(generator, tokens, heads * inputs + 3, dtype=dtype)[:, 3:]
                out = torch.zeros((tokens, heads, outputs + 5), dtype=dtype)[..., :outputs]
                weight = normal(generator, heads, outputs, inputs, dtype=dtype) / inputs**0.5
                yield Case(
                    label=f"{dtype}, {tokens} tokens, {heads} heads, {inputs} to {outputs}",
                    args=(rows.unflatten(-1, (heads, inputs)), weight, out),
                )
