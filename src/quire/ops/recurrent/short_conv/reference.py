"""Row after row, by torch."""

from __future__ import annotations

import torch
from torch.nn import functional

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
    gated: bool,
) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.recurrent.short_conv`)."""
    taps, size = weight.shape
    b, c, v = x.split(size, dim=1) if gated else (x, None, None)
    u, out = b if v is None else b * v, torch.empty((len(x), size), dtype=x.dtype, device=x.device)
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
        total = total.to(x.dtype)
        out[tokens] = functional.silu(total) if c is None else c[tokens] * total
        states[write[slot]] = seen[len(seen) - taps + 1 :].flatten()
    return out
