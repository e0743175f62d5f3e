"""Write the table of model families in `docs/models.md`, from the registry and the tests' cases.

python -m tools.model_table
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.models.families import BASES, CASES

from quire.config import ModelSpec, read_model_spec
from quire.config.gguf.checkpoint import ARCHITECTURES as GGUF_ARCHITECTURES
from quire.config.gguf.checkpoint import MIXTRAL
from quire.models.registry import ARCHITECTURES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- python -m tools.model_table writes this table -->\n", "\n<!-- end of it -->"

FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Llama 2, 3, 3.1 and what shares its code": ("LlamaForCausalLM", "LLaMAForCausalLM"),
        "Arcee (AFM)": ("ArceeForCausalLM",),
        "Mistral": ("MistralForCausalLM",),
        "Ministral 3": ("Ministral3ForCausalLM",),
        "Qwen2": ("Qwen2ForCausalLM",),
        "Qwen3": ("Qwen3ForCausalLM",),
        "Phi-3, 3.5, 4": ("Phi3ForCausalLM",),
        "OLMo 2": ("Olmo2ForCausalLM",),
        "OLMo 3": ("Olmo3ForCausalLM",),
        "Granite 3, dense": ("GraniteForCausalLM",),
        "GLM-4": ("GlmForCausalLM", "Glm4ForCausalLM"),
        "Command R": ("CohereForCausalLM",),
        "Command R7B": ("Cohere2ForCausalLM",),
        "EXAONE 4": ("Exaone4ForCausalLM",),
        "SmolLM3": ("SmolLM3ForCausalLM",),
        "Gemma 2": ("Gemma2ForCausalLM",),
        "Gemma 3, text": ("Gemma3ForCausalLM",),
        "Gemma 4, text": ("Gemma4ForCausalLM",),
        "StableLM": ("StableLmForCausalLM",),
        "StarCoder 2": ("Starcoder2ForCausalLM",),
        "Nemotron, Minitron": ("NemotronForCausalLM",),
        "Falcon": ("FalconForCausalLM",),
        "Bloom": ("BloomForCausalLM",),
        "Mixtral": ("MixtralForCausalLM",),
        "Qwen2-MoE": ("Qwen2MoeForCausalLM",),
        "Qwen3-MoE": ("Qwen3MoeForCausalLM",),
        "OLMoE": ("OlmoeForCausalLM",),
        "Phi-3.5-MoE": ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        "Granite 3 with experts": ("GraniteMoeForCausalLM",),
        "GLM-4.5 and later": ("Glm4MoeForCausalLM",),
        "gpt-oss": ("GptOssForCausalLM",),
        "MPT": ("MptForCausalLM", "MPTForCausalLM"),
        "OPT": ("OPTForCausalLM",),
        "GPT-NeoX, Pythia": ("GPTNeoXForCausalLM",),
        "GPT-2": ("GPT2LMHeadModel",),
        "BERT": ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
        "ModernBERT": (
            "ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification",
        ),
        "RoBERTa": ("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
        "XLM-R": (
            "XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification",
        ),
        "Decoders with a head for classes": (
            "LlamaForSequenceClassification", "MistralForSequenceClassification",
            "Phi3ForSequenceClassification", "Qwen2ForSequenceClassification",
            "Qwen3ForSequenceClassification",
        ),
        "Decoders without a head, for vectors": (
            "LlamaModel", "MistralModel", "Phi3Model", "Qwen2Model", "Qwen3Model", "Gemma2Model",
            "Gemma3TextModel",
        ),
    }
)  # fmt: skip
"""Names of families, with the architectures of each."""

_BESIDE = {MIXTRAL.name, "Olmo3ForCausalLM"}
"""Families whose GGUF files call themselves "llama" and "olmo2"."""

_ENCODERS = ("Bert", "ModernBert", "Roberta", "XLMRoberta")
_SCORES = {"soft_cap": "caps", "alibi_slopes": "ALiBi", "sinks": "sinks"}


def render_page(text: str) -> str:
    """The page `text` with the table of today."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return before + START + "\n".join(_rows()) + "\n" + END + after


def missing_families() -> set[str]:
    """Return architectures of the registry that are in no family, or the other way round."""
    return {name for names in FAMILIES.values() for name in names} ^ set(ARCHITECTURES)


def _rows() -> Iterator[str]:
    specs, gguf = _specs(), {each.name for each in GGUF_ARCHITECTURES.values()} | _BESIDE
    yield "| family | architectures | kind | GGUF | compared with `transformers` |"
    yield "|---|---|---|---|---|"
    for family, names in FAMILIES.items():
        found = [(case, spec) for case, spec in specs if spec.architecture in names]
        in_gguf = "yes" if set(names) & gguf else ""
        is_decoder = not names[0].startswith(_ENCODERS)
        others = "`tests/test_class_heads.py`" if is_decoder else "`tests/test_encoders.py`"
        cases = ", ".join(case for case, _ in found) or others
        shown = ", ".join(f"`{name}`" for name in names)
        kind = ", ".join(_kinds(spec for _, spec in found)) or (
            "dense" if is_decoder else "encoder"
        )
        yield f"| {family} | {shown} | {kind} | {in_gguf} | {cases} |"


def _kinds(specs: Iterable[ModelSpec]) -> list[str]:
    """Return words on what layers of these models have, each once."""
    words: dict[str, None] = {}
    for spec in specs:
        words["dense" if spec.experts is None else "experts"] = None
        if any(window is not None for window in spec.windows):
            words["windows"] = None
        if spec.has_learned_positions:
            words["learned positions"] = None
        elif any(rope is None for rope in spec.ropes) and "alibi_slopes" not in spec.score_options:
            words["layers without positions"] = None
        for option in sorted(spec.score_options):
            words[_SCORES[option]] = None
    return list(words)


def _specs() -> list[tuple[str, ModelSpec]]:
    """The cases of the tests by name, as quire reads them."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: list[tuple[str, ModelSpec]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        for case in CASES:
            base = BASES.get(case.model_type, {})
            config: Any = CONFIG_MAPPING[case.model_type](**{**base, **case.extra})
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.model_type]]
            file.write_text(json.dumps({**config.to_dict(), "dtype": "float32"}))
            found.append((case.name, read_model_spec(Path(folder))))
    return found


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
