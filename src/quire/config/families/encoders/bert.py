"""Encoders: BERT, and RoBERTa with its multilingual descendant XLM-R.

They draw no tokens: each token of a prompt sees all of it, and what comes out are hidden states, or
the classes of the prompt's first token (`…ForSequenceClassification`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config.families.encoders.classes import read_classes
from quire.config.families.family import Family
from quire.config.families.shared import (
    ACTIVATIONS,
    plain_block_matrices,
    read_common,
    read_heads,
    read_num_layers,
)
from quire.config.hf import RawConfig
from quire.config.model_spec import ModelSpec, ParameterCounts

__all__ = ["EncoderTraits", "FAMILIES"]


@dataclass(frozen=True, slots=True)
class EncoderTraits:
    """BERT and RoBERTa. prefix: beginning of names on disk. first_position: position of a prompt's
    first token in their table, which has num_positions rows. head: layers before the classes,
    "pooler" in BERT and "dense" in RoBERTa; None: there are no classes."""

    prefix: Literal["bert.", "roberta."]
    first_position: int
    num_positions: int
    head: Literal["pooler", "dense"] | None = None


def read_bert(raw: RawConfig, dtype: str) -> ModelSpec:
    """BERT (Devlin et al. 2019, arXiv:1810.04805) without a head."""
    return _read(raw, dtype, EncoderTraits("bert.", 0, _num_positions(raw)))


def read_bert_classes(raw: RawConfig, dtype: str) -> ModelSpec:
    return _read(raw, dtype, EncoderTraits("bert.", 0, _num_positions(raw), "pooler"))


def read_roberta(raw: RawConfig, dtype: str) -> ModelSpec:
    """RoBERTa (Liu et al. 2019, arXiv:1907.11692) and XLM-R (arXiv:1911.02116) without a head."""
    return _read(raw, dtype, EncoderTraits("roberta.", _after_padding(raw), _num_positions(raw)))


def read_roberta_classes(raw: RawConfig, dtype: str) -> ModelSpec:
    first, count = _after_padding(raw), _num_positions(raw)
    return _read(raw, dtype, EncoderTraits("roberta.", first, count, "dense"))


def _num_positions(raw: RawConfig) -> int:
    return raw.read_size("max_position_embeddings", default=512)


def _after_padding(raw: RawConfig) -> int:
    """The position after that of padding, whose id is that of the padding token."""
    return raw.read(int, "pad_token_id", default=1) + 1


def _read(raw: RawConfig, dtype: str, traits: EncoderTraits) -> ModelSpec:
    raw.reject("is_decoder", True, "quire serves these models as encoders")
    raw.reject("add_cross_attention", True, "quire serves these models as encoders")
    kind = raw.read(str, "position_embedding_type", default="absolute")
    if kind != "absolute":
        raise raw.unsupported("position_embedding_type", kind, ("absolute",))
    hidden, inner = raw.read_size("hidden_size"), raw.read_size("intermediate_size")
    num_layers, heads = read_num_layers(raw), read_heads(raw, hidden)
    common = read_common(raw, dtype, traits.prefix.rstrip("."), hidden, num_layers, heads)
    vocab, rows = common["vocab_size"], traits.num_positions
    types = raw.read_size("type_vocab_size", default=2)
    classes = None if traits.head is None else read_classes(raw)
    layer = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    num_classes = 0 if classes is None else len(classes.labels)
    head = hidden * hidden + hidden + num_classes * (hidden + 1) if num_classes else 0
    return ModelSpec(
        **common,
        intermediate_size=inner,
        activation=raw.read_choice(ACTIVATIONS, "hidden_act", default="gelu"),
        norm_eps=raw.read(float, "layer_norm_eps", default=1e-12),
        max_context=rows - traits.first_position,
        tie_word_embeddings=False,
        windows=(None,) * num_layers,
        ropes=(None,) * num_layers,
        traits=traits,
        parameters=ParameterCounts((vocab + rows + types + 2) * hidden, layer, head),
        matrices=plain_block_matrices(hidden, inner, num_layers),
        prompt_attention="bidirectional",
        is_encoder=True,
        classes=classes,
        token_types=types,
    )


_MODEL = "quire.compute.models.bert:BertModel"

FAMILIES = (
    Family(
        "BERT",
        _MODEL,
        "bert",
        {
            "BertModel": read_bert,
            "BertForMaskedLM": read_bert,
            "BertForSequenceClassification": read_bert_classes,
        },
    ),
    Family(
        "RoBERTa",
        _MODEL,
        "roberta",
        {
            "RobertaModel": read_roberta,
            "RobertaForMaskedLM": read_roberta,
            "RobertaForSequenceClassification": read_roberta_classes,
        },
    ),
    Family(
        "XLM-R",
        _MODEL,
        "xlm-roberta",
        {
            "XLMRobertaModel": read_roberta,
            "XLMRobertaForMaskedLM": read_roberta,
            "XLMRobertaForSequenceClassification": read_roberta_classes,
        },
    ),
)
