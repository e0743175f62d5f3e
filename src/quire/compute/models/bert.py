"""Encoders: BERT (Devlin et al. 2019, arXiv:1810.04805), RoBERTa (arXiv:1907.11692) and XLM-R
(arXiv:1911.02116).

Differ from decoders: tokens see the whole prompt, norms stand behind the sublayers, learned
positions, a table that tells the texts of a pair apart, and no projection to logits. A classifier
reads the state of the first token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.base.errors import EngineError
from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.layers.token_columns import TYPE_COLUMN
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.encoders.bert import EncoderTraits

__all__ = ["BertModel"]

WEIGHTS = WeightMap(
    prefix="bert.",
    outer={
        "embeddings.word_embeddings": "embed",
        "embeddings.position_embeddings": "embed_positions",
        "embeddings.token_type_embeddings": "embed_types",
        "embeddings.LayerNorm": "embed_norm",
    },
    blocks="encoder.layer.{}.",
    block={
        "attention.self.query": "qkv:q",
        "attention.self.key": "qkv:k",
        "attention.self.value": "qkv:v",
        "attention.output.dense": "output",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "mlp.up",
        "output.dense": "mlp.down",
        "output.LayerNorm": "mlp_norm",
    },
    embedding="bert.embeddings.word_embeddings.weight",
    ignored=(r"embeddings\.position_ids$", r"^cls\.", r"^lm_head\."),
    endings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
POOLER = r"(^|\.)pooler\."
"""Layers of a model that was trained to tell whether two texts follow each other, of no use to
vectors of other states."""


class BertBlock:
    """norm(x + attention(x)), then norm(x + mlp(x)); the sums are done by the norms."""

    def __init__(self, spec: ModelSpec, layer: int, make: LayerFactory) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention = make.attention(layer, heads)
        self.qkv = make.qkv_linear(size, self.attention, None, bias=True)
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(size, size, bias=True, unit=spec.head_dim)
        self.attention_norm = make.layer_norm(size, eps)
        self.mlp = make.mlp(size, spec.intermediate_size, spec.activation, bias=True)
        self.mlp_norm = make.layer_norm(size, eps)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """x [T, E] → [T, E]; of the last block those of the wanted tokens."""
        attended, x = self.wanted(self.attention(self.qkv(x), positions, step), x, step)
        x, _ = self.attention_norm.add(self.output(attended), x)
        x, _ = self.mlp_norm.add(self.mlp(x), x)
        return x


class BertModel:
    """A `CausalLM` that has no logits, and `Classifies` if it has classes."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, EncoderTraits)
        size, first = spec.hidden_size, traits.first_position
        self.weight_map = _weights_of(traits)
        self.lm_head = None
        self.embed = make.token_embedding(spec.vocab_size, size)
        self.embed_positions = make.embedding(traits.num_positions, size, offset=first)
        self.embed_types = make.embedding(spec.token_types, size)
        self.types = make.token_column(TYPE_COLUMN)
        self.add = make.residual_add()
        self.embed_norm = make.layer_norm(size, spec.norm_eps)
        self.blocks = [BertBlock(spec, layer, make) for layer in range(spec.num_layers)]
        self.classes = make.class_heads.dense(size, spec.num_classes) if spec.num_classes else None

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x = self.add(self.embed(token_ids), self.embed_types(self.types.values))
        x, _ = self.embed_norm.add(self.embed_positions(positions), x)
        for block in self.blocks:
            x = block(x, positions, step)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises EngineError: requests that draw tokens are refused before."""
        raise EngineError(f"an encoder has no logits, but {len(hidden)} rows were to draw tokens")

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] of first tokens → a number for each class, float32 [N, C]."""
        if self.classes is None:
            raise EngineError("the model has no classes, but rows were to be sorted into some")
        return self.classes(hidden)


def _weights_of(traits: EncoderTraits) -> WeightMap:
    """Names on disk. RoBERTa's classifier has the layer that BERT calls its pooler."""
    names = replace(
        WEIGHTS,
        prefix=traits.prefix,
        embedding=traits.prefix + WEIGHTS.embedding.removeprefix(WEIGHTS.prefix),
    )
    if traits.head is None:
        return replace(names, ignored=(*names.ignored, POOLER))
    if traits.head == "pooler":
        outer = {**names.outer, "pooler.dense": "classes.dense"}
        return replace(names, outer=outer, beside={"classifier": "classes.projection"})
    beside = {
        "classifier.dense": "classes.dense",
        "classifier.out_proj": "classes.projection",
    }
    return replace(names, ignored=(*names.ignored, POOLER), beside=beside)
