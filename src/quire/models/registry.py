"""Architecture name to model class, imported only when asked for.

A third party adds an architecture with an entry point of the group `quire.models` that names a
`ModelFactory`, next to one of the group `quire.model_specs` that reads its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

import torch

from quire.config.model_spec import ModelSpec
from quire.errors import ConfigError, QuireError
from quire.layers import LayerFactory
from quire.models.causal_lm import CausalLM, ModelFactory
from quire.platform.interrupts import is_ctrl_c

__all__ = ["ARCHITECTURES", "find_model"]

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "ArceeForCausalLM": "quire.models.llama:LlamaModel",
        "BertForMaskedLM": "quire.models.bert:BertModel",
        "BertForSequenceClassification": "quire.models.bert:BertModel",
        "BertModel": "quire.models.bert:BertModel",
        "BloomForCausalLM": "quire.models.centered:CenteredModel",
        "Cohere2ForCausalLM": "quire.models.parallel:CohereModel",
        "CohereForCausalLM": "quire.models.parallel:CohereModel",
        "Gemma2ForCausalLM": "quire.models.gemma2:Gemma2Model",
        "Gemma3ForCausalLM": "quire.models.gemma2:Gemma2Model",
        "Gemma4ForCausalLM": "quire.models.gemma4:Gemma4Model",
        "Exaone4ForCausalLM": "quire.models.llama:LlamaModel",
        "FalconForCausalLM": "quire.models.centered:CenteredModel",
        "Gemma2Model": "quire.models.gemma2:Gemma2Model",
        "Gemma3TextModel": "quire.models.gemma2:Gemma2Model",
        "GPT2LMHeadModel": "quire.models.gpt2:GPT2Model",
        "Glm4MoeForCausalLM": "quire.models.llama:LlamaModel",
        "Glm4ForCausalLM": "quire.models.llama:LlamaModel",
        "GlmForCausalLM": "quire.models.llama:LlamaModel",
        "GptOssForCausalLM": "quire.models.llama:LlamaModel",
        "GPTNeoXForCausalLM": "quire.models.gpt_neox:GPTNeoXModel",
        "GraniteForCausalLM": "quire.models.llama:LlamaModel",
        "GraniteMoeForCausalLM": "quire.models.llama:LlamaModel",
        "LlamaForCausalLM": "quire.models.llama:LlamaModel",
        "LlamaForSequenceClassification": "quire.models.llama:LlamaModel",
        "LlamaModel": "quire.models.llama:LlamaModel",
        "LLaMAForCausalLM": "quire.models.llama:LlamaModel",
        "Ministral3ForCausalLM": "quire.models.llama:LlamaModel",
        "MistralForCausalLM": "quire.models.llama:LlamaModel",
        "MistralForSequenceClassification": "quire.models.llama:LlamaModel",
        "MistralModel": "quire.models.llama:LlamaModel",
        "MixtralForCausalLM": "quire.models.llama:LlamaModel",
        "ModernBertForMaskedLM": "quire.models.modernbert:ModernBertModel",
        "ModernBertForSequenceClassification": "quire.models.modernbert:ModernBertModel",
        "ModernBertModel": "quire.models.modernbert:ModernBertModel",
        "MptForCausalLM": "quire.models.mpt:MPTModel",
        "MPTForCausalLM": "quire.models.mpt:MPTModel",
        "NemotronForCausalLM": "quire.models.centered:CenteredModel",
        "OPTForCausalLM": "quire.models.opt:OPTModel",
        "Olmo2ForCausalLM": "quire.models.llama:LlamaModel",
        "Olmo3ForCausalLM": "quire.models.llama:LlamaModel",
        "OlmoeForCausalLM": "quire.models.llama:LlamaModel",
        "Phi3ForCausalLM": "quire.models.llama:LlamaModel",
        "Phi3ForSequenceClassification": "quire.models.llama:LlamaModel",
        "Phi3Model": "quire.models.llama:LlamaModel",
        "PhiMoEForCausalLM": "quire.models.centered:CenteredModel",
        "PhimoeForCausalLM": "quire.models.centered:CenteredModel",
        "Qwen2ForCausalLM": "quire.models.llama:LlamaModel",
        "Qwen2ForSequenceClassification": "quire.models.llama:LlamaModel",
        "Qwen2Model": "quire.models.llama:LlamaModel",
        "Qwen2MoeForCausalLM": "quire.models.llama:LlamaModel",
        "Qwen3ForCausalLM": "quire.models.llama:LlamaModel",
        "Qwen3ForSequenceClassification": "quire.models.llama:LlamaModel",
        "Qwen3Model": "quire.models.llama:LlamaModel",
        "Qwen3MoeForCausalLM": "quire.models.llama:LlamaModel",
        "RobertaForMaskedLM": "quire.models.bert:BertModel",
        "RobertaForSequenceClassification": "quire.models.bert:BertModel",
        "RobertaModel": "quire.models.bert:BertModel",
        "SmolLM3ForCausalLM": "quire.models.llama:LlamaModel",
        "StableLmForCausalLM": "quire.models.centered:CenteredModel",
        "Starcoder2ForCausalLM": "quire.models.centered:CenteredModel",
        "XLMRobertaForMaskedLM": "quire.models.bert:BertModel",
        "XLMRobertaForSequenceClassification": "quire.models.bert:BertModel",
        "XLMRobertaModel": "quire.models.bert:BertModel",
    }
)


def find_model(architecture: str) -> ModelFactory:
    """Return the factory of the model. Raises ConfigError listing the supported names for an
    unknown one."""
    place = ARCHITECTURES.get(architecture)
    if place is not None:
        module, _, name = place.partition(":")
        return getattr(import_module(module), name)
    third_party = {point.name: point for point in entry_points(group="quire.models")}
    if architecture in third_party:
        return partial(_made_by_others, architecture, third_party[architecture])
    known = ", ".join(sorted({*ARCHITECTURES, *third_party}))
    raise ConfigError(
        f"architecture {architecture!r} is not supported: its config.json is read, but there is no "
        f"model in quire.models.registry or the entry points quire.models; quire serves {known}"
    )


def _made_by_others(
    architecture: str, point: EntryPoint, spec: ModelSpec, factory: LayerFactory
) -> CausalLM:
    """Make a model of somebody's package. ConfigError with its words for whatever it raises."""
    try:
        return point.load()(spec, factory)
    except (QuireError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(
            f"the model of architecture {architecture!r} ({point.value}) failed ({error!r}): mend "
            "its package, or leave it out"
        ) from error
