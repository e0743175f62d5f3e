"""Gemma 2 (Riviere et al. 2024, arXiv:2408.00118) and Gemma 3's text model (arXiv:2503.19786).

Differs from Llama: norms also after attention and MLP, whose weights on disk lack the 1 that is
added to them; scaled embeddings; soft caps on scores and logits; every other layer slides. Gemma 3
has norms on the heads of q and k in place of the caps, and slides in five layers of six.
"""

from __future__ import annotations

import torch

from quire.base.errors import EngineError
from quire.compute.attention import ScoreOptions, StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.gemma import Gemma2Traits, Gemma3Traits

__all__ = ["Gemma2Model"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={"embed_tokens": "embed", "norm": "norm"},
    blocks="layers.{}.",
    block={
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "qkv:q",
        "self_attn.k_proj": "qkv:k",
        "self_attn.v_proj": "qkv:v",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "self_attn.o_proj": "output",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate_up:gate",
        "mlp.up_proj": "mlp.gate_up:up",
        "mlp.down_proj": "mlp.down",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
    embedding="model.embed_tokens.weight",
    ignored=(r"rotary_emb\.inv_freq$",),
)


class Gemma2Block:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); the norms before do the sums."""

    def __init__(
        self, spec: ModelSpec, traits: Gemma2Traits, layer: int, make: LayerFactory
    ) -> None:
        size = spec.hidden_size
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (
            make.rms_norm(size, spec.norm_eps, offset=1.0) for _ in range(4)
        )
        self.attention = make.attention(
            layer,
            heads,
            scale=traits.attention_scale,
            rope=spec.ropes[layer],
            qk_norm_eps=spec.norm_eps if isinstance(traits, Gemma3Traits) else None,
            qk_norm_offset=1.0,
            scores=ScoreOptions(soft_cap=traits.score_cap),
        )
        self.qkv = make.qkv_linear(size, self.attention, self.attention_norm, bias=traits.bias)
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(
            spec.num_heads * spec.head_dim, size, bias=traits.bias, unit=spec.head_dim
        )
        self.mlp = make.gated_mlp(size, spec.intermediate_size, spec.activation)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] and the residual stream [T, E], which the next norm adds. The last block returns
        those of the wanted tokens."""
        x, residual = self.attention_norm.add(x, residual)
        x, residual = self.wanted(self.attention(self.qkv(x), positions, step), residual, step)
        x, residual = self.mlp_norm.add(self.attention_post_norm(self.output(x)), residual)
        return self.mlp_post_norm(self.mlp(x)), residual


class Gemma2Model:
    """`CausalLM` of Gemma 2 and 3."""

    weight_map = WEIGHTS

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, Gemma2Traits)
        self.lm_head = None
        if spec.draws_tokens:
            self.embed, self.lm_head = make.embedding_and_head(
                spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
            )
        else:
            self.embed = make.token_embedding(spec.vocab_size, spec.hidden_size)
        self._embed_scale = make.embedding_scale(spec.hidden_size**0.5)
        self.blocks = [Gemma2Block(spec, traits, layer, make) for layer in range(spec.num_layers)]
        self.norm = make.rms_norm(spec.hidden_size, spec.norm_eps, offset=1.0)
        self._cap = None if traits.logit_cap is None else make.soft_cap(traits.logit_cap)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x, residual = self._embed_scale(self.embed(token_ids)), None
        for block in self.blocks:
            x, residual = block(x, residual, positions, step)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] → float32 [N, V]. EngineError without a head for logits: requests that draw
        tokens are refused before."""
        if self.lm_head is None:
            raise EngineError(f"the model has no logits, but {len(hidden)} rows were to draw")
        logits = self.lm_head(hidden)
        return logits if self._cap is None else self._cap(logits)
