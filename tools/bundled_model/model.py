"""A Llama model small enough to read at one sitting, used only to train the bundled weights.

Parameter names follow the Hugging Face layout, so that `export.py` writes them as they are.
Shape letters: N rows, T tokens of a row, H query heads, K kv heads, D head_dim, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network; the defaults are those of the bundled model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019, eq. 4) computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q = self.q_proj(x).view(rows, tokens, self.heads, self.head_dim)
        k = self.k_proj(x).view(rows, tokens, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(rows, tokens, self.kv_heads, self.head_dim)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class MLP(nn.Module):
    """Gated feed-forward layer (Shazeer 2020, SwiGLU)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Token ids [N, T] to logits [N, T, V]; the output matrix is the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        # Layers that write into the residual stream start smaller (Radford et al. 2019, 2.3).
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=residual_std if small else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        x = self.embed_tokens(ids)
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_positions, 1, D/2] (Su et al. 2021, eq. 15)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.arange(config.max_positions).float()[:, None] / config.rope_theta**exponents
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of every head [N, T, H, D] against each other."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
