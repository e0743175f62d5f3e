"""ModernBERT (Warner et al. 2024, arXiv:2412.13663).

Differs from BERT: norms before the sublayers, of which the first is missing since embeddings are
normed; rotated positions; a gate in the MLP; most layers see a window around each token. The head
for classes has a norm.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.base.errors import EngineError
from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.encoders.modernbert import ModernBertTraits

__all__ = ["ModernBertModel"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={
        "embeddings.tok_embeddings": "embed",
        "embeddings.norm": "embed_norm",
        "final_norm": "norm",
    },
    blocks="layers.{}.",
    block={
        "attn_norm": "attention_norm",
        "attn.Wqkv": "qkv",
        "attn.Wo": "output",
        "mlp_norm": "mlp_norm",
        "mlp.Wi": "mlp.gate_up",
        "mlp.Wo": "mlp.down",
    },
    embedding="model.embeddings.tok_embeddings.weight",
    ignored=(r"^decoder\.", r"^head\.", r"^classifier\."),
)
WITH_CLASSES = replace(
    WEIGHTS,
    beside={
        "head.dense": "classes.dense",
        "head.norm": "classes.norm",
        "classifier": "classes.projection",
    },
    ignored=(),
)


class ModernBertBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); the sums are done by the norms."""

    def __init__(
        self, spec: ModelSpec, traits: ModernBertTraits, layer: int, make: LayerFactory
    ) -> None:
        size, eps, bias = spec.hidden_size, spec.norm_eps, traits.norm_bias
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention_norm = make.layer_norm(size, eps, bias=bias) if layer else None
        self.attention = make.attention(layer, heads, rope=spec.ropes[layer])
        self.qkv = make.qkv_linear(
            size, self.attention, self.attention_norm, bias=traits.attention_bias, fused=True
        )
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(size, size, bias=traits.attention_bias, unit=spec.head_dim)
        self.mlp_norm = make.layer_norm(size, eps, bias=bias)
        self.mlp = make.gated_mlp(
            size, spec.intermediate_size, spec.activation, bias=traits.mlp_bias, fused=True
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] and the residual stream [T, E], which the next norm adds; None before the first
        block. The last block returns those of the wanted tokens."""
        if self.attention_norm is None:
            residual = x
        else:
            x, residual = self.attention_norm.add(x, residual)
        x, residual = self.wanted(self.attention(self.qkv(x), positions, step), residual, step)
        x, residual = self.mlp_norm.add(self.output(x), residual)
        return self.mlp(x), residual


class ModernBertModel:
    """A `CausalLM` that has no logits, and `Classifies` if it has classes."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, ModernBertTraits)
        size, eps, bias = spec.hidden_size, spec.norm_eps, traits.norm_bias
        self.lm_head, self.classes = None, None
        self.weight_map = WITH_CLASSES if spec.num_classes else WEIGHTS
        self.embed = make.token_embedding(spec.vocab_size, size)
        self.embed_norm = make.layer_norm(size, eps, bias=bias)
        self.blocks = [ModernBertBlock(spec, traits, i, make) for i in range(spec.num_layers)]
        self.norm = make.layer_norm(size, eps, bias=bias)
        if spec.num_classes:
            self.classes = make.class_heads.normed(
                size,
                spec.num_classes,
                traits.head_activation,
                make.layer_norm(size, eps, bias=bias),
                bias=traits.head_bias,
            )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x, residual = self.embed_norm(self.embed(token_ids)), None
        for block in self.blocks:
            x, residual = block(x, residual, positions, step)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises EngineError: requests that draw tokens are refused before."""
        raise EngineError(f"an encoder has no logits, but {len(hidden)} rows were to draw tokens")

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] of first tokens, or means of all → a number for each class, float32
        [N, C]."""
        if self.classes is None:
            raise EngineError("the model has no classes, but rows were to be sorted into some")
        return self.classes(hidden)
