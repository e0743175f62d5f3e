"""SqueezeLLM (Kim et al. 2023, arXiv:2306.07629): dense numbers from tables, and sparse ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.packed.schemes import SqueezeLLM
from quire.ops.linear.tables.contract import Added, Tables
from quire.quantization.packed.integers import fields

__all__ = ["squeezellm"]


def squeezellm(scheme: SqueezeLLM, tensors: Mapping[str, torch.Tensor], outputs: slice) -> Tables:
    """table[o, q] + sparse + full rows; the sparse matrix is compressed by its rows, which are
    outputs, and so are the full ones."""
    codes = fields(tensors["qweight"][:, outputs].t(), scheme.bits)
    table = tensors["lookup_table"][outputs].float()
    added: list[Added] = []
    if "rows" in tensors:
        ends = tensors["rows"][outputs.start : outputs.stop + 1].long()
        chosen = slice(int(ends[0]), int(ends[-1]))
        row = torch.arange(len(codes), device=ends.device).repeat_interleave(ends.diff())
        numbers = tensors["vals"][chosen].float()
        added.append(Added(row, tensors["cols"][chosen].long(), numbers))
    if "full_rows" in tensors:
        index = tensors["full_row_indices"].long()
        here = (index >= outputs.start) & (index < outputs.stop)
        full = tensors["full_rows"].t()[here].float()
        row = (index[here] - outputs.start)[:, None].expand_as(full)
        column = torch.arange(full.shape[1], device=full.device).expand_as(full)
        added.append(Added(row.flatten(), column.flatten(), full.flatten()))
    sums = Added(*(torch.cat(parts) for parts in zip(*added, strict=True))) if added else None
    return Tables(codes, table, torch.ones(len(codes), 1, device=table.device), sums)
