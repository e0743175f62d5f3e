"""Row after row and token after token, by torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from quire.ops.recurrent.gated_delta.reference import COLUMNS

__all__ = ["ssd"]


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    log_rates: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    num_computed: torch.Tensor,
    groups: tuple[int, int],
    limits: tuple[float, float],
) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.recurrent.ssd`)."""
    (num_groups, size), num_heads = groups, len(log_rates)
    of_groups = num_groups * size
    v, b, c = x.float().split([x.shape[1] - 2 * of_groups, of_groups, of_groups], 1)
    v = v.view(len(x), num_heads, -1)
    b, c = (
        part.view(-1, num_groups, size).repeat_interleave(num_heads // num_groups, dim=1)
        for part in (b, c)
    )
    delta = functional.softplus(dt.float() + bias).clamp(*limits)
    decay = torch.exp(-log_rates.exp() * delta)
    added, out = delta[..., None] * v, torch.empty_like(v)
    blocks = (num_heads, v.shape[2] // COLUMNS, size, COLUMNS)
    for row, slot in enumerate(slots.tolist()):
        state = states[read[slot]].view(blocks).transpose(1, 2).reshape(num_heads, size, -1)
        if num_computed[slot] == 0:
            state = torch.zeros_like(state)
        for t in range(int(starts[row]), int(starts[row + 1])):
            state = state * decay[t, :, None, None] + b[t, :, :, None] * added[t, :, None, :]
            out[t] = torch.einsum("hnp,hn->hp", state, c[t]) + skip[:, None] * v[t]
        by_block = state.view(num_heads, size, -1, COLUMNS).transpose(1, 2)
        states[write[slot]] = by_block.flatten()
    return out.flatten(1).to(x.dtype)
