"""AWQ (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ stores it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.packed.schemes import AWQ
from quire.quantization.packed.integers import Integers, fields

__all__ = ["awq"]

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of 8 neighbouring outputs among the fields of a "gemm" word, which hold outputs 0,
2, 4, 6, 1, 3, 5, 7."""


def awq(scheme: AWQ, tensors: Mapping[str, torch.Tensor], outputs: slice) -> Integers:
    """(q - z) · s; 4 bits, a zero point and a scale for each group of neighbouring inputs."""
    if scheme.packing == "gemv":
        values = fields(tensors["qweight"][outputs], 4)
        num_groups = scheme.num_groups(values.shape[1])
        zeros = fields(tensors["qzeros"][outputs], 4)[:, :num_groups]
        scales = tensors["scales"][outputs, :num_groups]
    else:
        words = slice(outputs.start // 8, outputs.stop // 8)
        values = _outputs(tensors["qweight"][:, words])
        zeros = _outputs(tensors["qzeros"][:, words])
        scales = tensors["scales"][:, outputs].t()
    size = values.shape[1] if scheme.group_size == -1 else scheme.group_size
    return Integers(values, zeros, scales.float(), size)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, O / 8] → uint8 [O, n]."""
    return fields(words, 4).unflatten(1, (-1, 8))[:, :, list(ORDER)].flatten(1).t()
