"""Row after row and token after token, by torch."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["COLUMNS", "gated_delta"]

COLUMNS = 16
"""Columns of a block of the state (csrc/recurrent/gated_delta.cpp)."""


def gated_delta(
    x: torch.Tensor,
    gates: torch.Tensor,
    log_rates: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    num_computed: torch.Tensor,
    keys: tuple[int, int],
    in_turn: bool,
) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.recurrent.gated_delta`)."""
    (num_keys, key_dim), num_heads = keys, len(log_rates)
    value_dim = (x.shape[1] - 2 * num_keys * key_dim) // num_heads
    q, k, v = x.float().split([num_keys * key_dim, num_keys * key_dim, num_heads * value_dim], 1)
    q, k = (_unit(part.view(-1, num_keys, key_dim)) for part in (q, k))
    heads = torch.arange(num_heads, device=x.device)
    of_key = heads % num_keys if in_turn else heads // (num_heads // num_keys)
    q, k = q[:, of_key], k[:, of_key]
    q, v = q / key_dim**0.5, v.view(-1, num_heads, value_dim)
    b, a = gates.float().chunk(2, dim=1)
    beta = torch.sigmoid(b)
    alpha = torch.exp(-log_rates.exp() * functional.softplus(a + bias))
    out = torch.empty_like(v)
    blocks = (num_heads, value_dim // COLUMNS, key_dim, COLUMNS)
    for row, slot in enumerate(slots.tolist()):
        state = states[read[slot]].view(blocks).transpose(1, 2).reshape(num_heads, key_dim, -1)
        if num_computed[slot] == 0:
            state = torch.zeros_like(state)
        for t in range(int(starts[row]), int(starts[row + 1])):
            state = state * alpha[t, :, None, None]
            delta = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t, :, :, None] * delta[:, None, :]
            out[t] = torch.einsum("hkv,hk->hv", state, q[t])
        by_block = state.view(num_heads, key_dim, -1, COLUMNS).transpose(1, 2)
        states[write[slot]] = by_block.flatten()
    return out.flatten(1).to(x.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
