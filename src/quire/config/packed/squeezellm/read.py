"""Meaning of the bits of SqueezeLLM."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.config.packed.read import (
    BrokenError,
    Part,
    Reading,
    Tensors,
    axes_of,
    check_range,
    fields,
)
from quire.config.packed.squeezellm.scheme import SqueezeLLM
from quire.ops.linear.tables.contract import Added, Tables

__all__ = ["READINGS"]


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


def cut_squeezellm(scheme: SqueezeLLM, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    outputs, inputs = axes_of(part)
    found = {
        "qweight": outputs.of(inputs.words(tensors["qweight"], 0, scheme.bits), 1),
        "lookup_table": outputs.of(tensors["lookup_table"], 0),
    }
    if "rows" in tensors:
        ends = tensors["rows"][part.outputs.start : part.outputs.stop + 1].long()
        chosen = slice(int(ends[0]), int(ends[-1]))
        columns, numbers = tensors["cols"][chosen], tensors["vals"][chosen]
        here = (columns >= part.inputs.start) & (columns < part.inputs.stop)
        before = torch.nn.functional.pad(here.cumsum(0), (1, 0))
        found["rows"] = before[ends - ends[0]].to(torch.int32)
        found["cols"] = columns[here] - part.inputs.start
        found["vals"] = numbers[here]
    if "full_rows" in tensors:
        index = tensors["full_row_indices"]
        mine = (index >= part.outputs.start) & (index < part.outputs.stop)
        found["full_rows"] = inputs.of(tensors["full_rows"], 0)[:, mine]
        found["full_row_indices"] = index[mine] - part.outputs.start
    return found


def _check(scheme: SqueezeLLM, tensors: Tensors, shape: tuple[int, int]) -> None:
    del scheme
    check_range(tensors, "cols", 0, shape[1] - 1)
    check_range(tensors, "full_row_indices", 0, shape[0] - 1)
    rows = tensors.get("rows")
    if rows is not None:
        ends = (int(rows[0]), int(rows[-1]))
        if ends != (0, len(tensors["cols"])) or bool((rows.diff() < 0).any()):
            raise BrokenError("rows", "ends of rows that are out of order")


READINGS: Mapping[type, Reading] = MappingProxyType(
    {SqueezeLLM: Reading(squeezellm, cut_squeezellm, _check)}
)
