"""The layer of EAGLE (Li et al. 2024, arXiv:2401.15077) for the bundled model, as it is trained.

Parameter names are those under which such layers are published. Shape letters as in `model.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from export import hf_config
from model import MLP, Attention, ModelConfig, RMSNorm, TinyLlama, rotary_tables
from safetensors.torch import save_file
from torch import Tensor, nn


class _Layer(nn.Module):
    """A decoder layer without the norm before attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(x, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """Embedded tokens and the model's states before them, both [N, T, C], to states at these tokens
    [N, T, C], from which the model's own head guesses the next ones."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([_Layer(config)])
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Begin as the guess that the state stays as it is."""
        size = self.fc.out_features
        nn.init.zeros_(self.fc.bias)
        nn.init.normal_(self.fc.weight, std=0.02)
        with torch.no_grad():
            self.fc.weight[:, size:] += torch.eye(size)
        for name, weight in self.layers.named_parameters():
            if weight.ndim == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.005 if small else 0.02)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        tokens = embedded.shape[1]
        x = self.fc(torch.cat((embedded, states.to(embedded.dtype)), dim=-1))
        for layer in self.layers:
            x = layer(x, self.cos[:tokens], self.sin[:tokens])
        return x


def states_of(model: TinyLlama, ids: Tensor) -> Tensor:
    """States after the final norm [N, T, C] of token ids [N, T]."""
    x, tokens = model.embed_tokens(ids), ids.shape[1]
    for layer in model.layers:
        x = layer(x, model.cos[:tokens], model.sin[:tokens])
    return model.norm(x)


def export_head(head: EagleHead, config: ModelConfig, folder: Path) -> None:
    """Write a checkpoint in bf16, in the published layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in head.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = {**hf_config(config), "num_hidden_layers": 1, "bias": True}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
