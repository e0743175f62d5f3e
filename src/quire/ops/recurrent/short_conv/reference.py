"""Row after row, by torch."""

from __future__ import annotations

import torch

__all__ = ["short_conv"]


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    num_computed: torch.Tensor,
) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.recurrent.short_conv`)."""
    taps, size = weight.shape
    b, c, v = x.split(size, dim=1)
    u, out = b * v, torch.empty_like(c, memory_format=torch.contiguous_format)
    for row, slot in enumerate(slots.tolist()):
        tokens = slice(int(starts[row]), int(starts[row + 1]))
        past = states[read[slot]].view(taps - 1, size)
        if num_computed[slot] == 0:
            past = torch.zeros_like(past)
        seen = torch.cat((past, u[tokens]))
        windows = seen.float().unfold(0, taps, 1)  # [tokens, E, L]
        total = (windows * weight.float().t()).sum(-1)
        if bias is not None:
            total += bias.float()
        out[tokens] = c[tokens] * total.to(x.dtype)
        states[write[slot]] = seen[len(seen) - taps + 1 :].flatten()
    return out
