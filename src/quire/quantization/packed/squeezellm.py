"""SqueezeLLM (Kim et al. 2023, arXiv:2306.07629): dense numbers from tables, and sparse ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.packed.schemes import SqueezeLLM
from quire.quantization.packed.integers import fields

__all__ = ["squeezellm"]


def squeezellm(
    scheme: SqueezeLLM, tensors: Mapping[str, torch.Tensor], outputs: slice
) -> torch.Tensor:
    """table[o, q] + sparse + full rows; the sparse matrix is compressed by its rows, which are
    outputs, and so are the full ones."""
    values = fields(tensors["qweight"][:, outputs].t(), scheme.bits)
    numbers = tensors["lookup_table"][outputs].float().gather(1, values.long())
    if "rows" in tensors:
        ends = tensors["rows"][outputs.start : outputs.stop + 1].long()
        chosen = slice(int(ends[0]), int(ends[-1]))
        row = torch.arange(len(values), device=ends.device).repeat_interleave(ends.diff())
        place = (row, tensors["cols"][chosen].long())
        numbers.index_put_(place, tensors["vals"][chosen].float(), accumulate=True)
    if "full_rows" in tensors:
        index = tensors["full_row_indices"].long()
        here = (index >= outputs.start) & (index < outputs.stop)
        full = tensors["full_rows"].t()[here].float()
        numbers.index_add_(0, index[here] - outputs.start, full)
    return numbers
