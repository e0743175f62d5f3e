"""No key of config.json is passed over: each is changed alone in a tiny model of every family, and
where that changes what `transformers` computes, quire computes the same, or it refuses the key by
name. A soak takes every variant, the usual run one of each family.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.models.families import CASES, GEMMA4_WHOLE, Case, is_factor
from tests.models.family_bases import BASES, VOCAB
from tests.models.harness import PagedModel
from tests.profiles import SCALE

from quire.base.errors import ConfigError
from quire.compute.models.causal_lm import Classifies
from quire.compute.models.registry import ARCHITECTURES
from quire.config import ModelSpec, read_model_spec

CHANGE = 1e-3
"""Share of the largest logit: a key that changes less has no effect."""

TOLERANCE = 1e-4
Kind = Literal["logits", "vectors", "classes"]
MAKERS = {
    "logits": "AutoModelForCausalLM",
    "vectors": "AutoModel",
    "classes": "AutoModelForSequenceClassification",
}


@dataclass(frozen=True)
class Family:
    """A variant of a family, and what of its models is compared."""

    case: Case
    kind: Kind = "logits"

    @property
    def config(self) -> dict[str, Any]:
        return {**BASES.get(self.case.model_type, {}), **self.case.extra}

    @property
    def architecture(self) -> str:
        from transformers.models.auto import modeling_auto as auto

        names = {
            "logits": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            "vectors": auto.MODEL_MAPPING_NAMES,
            "classes": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        }
        return names[self.kind][self.case.model_type]


_ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
}
ENCODERS = tuple(Case(name, name, _ENCODER) for name in ("bert", "roberta", "xlm-roberta"))
MODERN = Case(
    "modernbert", "modernbert", {**_ENCODER, "local_attention": 8, "global_attn_every_n_layers": 2}
)
FIRST = {case.model_type: case for case in reversed(CASES)} | {"gemma4_text": GEMMA4_WHOLE}
"""The first case of each family, but of Gemma 4 one that has all keys."""

SORTING = tuple(FIRST[name] for name in ("llama", "mistral", "phi3", "qwen2", "qwen3"))
USUAL = (
    *(Family(case) for case in FIRST.values()),
    *(Family(case, "vectors") for case in (*ENCODERS[:2], MODERN)),
    *(Family(case, "classes") for case in (ENCODERS[0], SORTING[0])),
)
FAMILIES = (
    *USUAL,
    Family(ENCODERS[2], "vectors"),  # whose config is read as RoBERTa's
    *(Family(case, "classes") for case in (*ENCODERS[1:], MODERN, *SORTING[1:])),
    *(Family(case) for case in CASES if case not in FIRST.values()),
)
"""Behind the usual ones those whose keys are read by the same lines."""

SPELLINGS = {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "BertForMaskedLM": "BertModel",
    "RobertaForMaskedLM": "RobertaModel",
    "XLMRobertaForMaskedLM": "XLMRobertaModel",
    "ModernBertForMaskedLM": "ModernBertModel",
}
"""Architectures that mean another one: `transformers` has no models of the first three names, and
quire has no use for the head of the others."""

HEADLESS = {
    "Gemma2Model": "Gemma2ForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Phi3Model": "Phi3ForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
}
"""Architectures that mean another one without its head for logits."""

TOKENS = torch.randint(4, VOCAB, (1, 41), generator=torch.Generator().manual_seed(5))
"""None stands for padding, whatever its id is changed to."""

PASSED_OVER = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "return_dict",
}  # fmt: skip
"""Keys with which a file describes itself, or selects the library's results."""

BY_LENGTH = {
    ("llama-dynamic", "max_position_embeddings"),
    ("phimoe-bias", "original_max_position_embeddings"),
    ("deepseek-v32", "index_topk"),
    ("glm-moe-dsa", "index_topk"),
}
"""Keys of ropes that follow the length. A base that grows: `transformers` takes that of the whole
prompt for all of its tokens, quire that of each, which test_golden.py compares. LongRoPE of PhiMoE:
`transformers` keeps the short factors (docs/models.md). An index: the engine refuses contexts that
are longer (tests/engine/test_latent_models.py)."""

ROPE_PARTS = (
    "factor", "partial_rotary_factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast",
    "beta_slow", "truncate", "original_max_position_embeddings",
)  # fmt: skip
"""Keys of `rope_parameters` that `modeling_rope_utils.py` takes as absent or None."""

OTHER_PARTS = re.compile("Vision|Audio|Multimodal|ConditionalGeneration|Gemma[34]n?Model$")
"""Classes in files of the library that texts alone do not pass through."""

NAMED_BY = {"layer_types": "sliding_window", "hidden_size": "head_dim"}
"""Keys by which a value of another one may be refused, since they decide together."""


def candidates(key: str, value: Any) -> list[Any]:
    """Other values of the type, likely ones first."""
    if key == "use_bidirectional_attention":
        return [not value, "all"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value // 2, 2 * value, value + 1, value + 2]
    if isinstance(value, float):
        return [1.5 * value or 0.25, 50 * value, value / 2]
    if isinstance(value, str) and "act" in key:
        return [name for name in ("gelu", "relu", "silu", "gelu_new", "mish") if name != value]
    if isinstance(value, str):
        return ["sliding_attention", "linear", "dynamic"]
    if isinstance(value, list):
        return [*other_lists(value)]
    return [3, 0.5, True, "gelu"] if value is None else []


def other_lists(value: list[Any]) -> Iterator[list[Any]]:
    if not value:
        yield [0]
    elif isinstance(value[0], str):
        yield ["full_attention"] * len(value)
        yield ["sliding_attention"] * len(value)
    elif all(each in (0, 1) for each in value):
        yield [1 - each for each in value]
    else:
        yield [1.5 * each for each in value]


def changes(config: Mapping[str, Any]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Each key, also of nested objects, the key above it, and configs with other values there."""
    for key, value in config.items():
        if key in PASSED_OVER:
            continue
        if isinstance(value, dict):
            for inner, _, nested in changes(value):
                yield inner, key, [{**config, key: each} for each in nested]
        else:
            yield key, key, [{**config, key: each} for each in candidates(key, value)]


def unlisted(config: Any) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield the same as `changes` for keys that the library's code reads but a saved config lacks,
    such as `is_causal`."""
    import transformers

    library = Path(transformers.__file__).parent
    own = Path(inspect.getfile(type(config))).parent
    shared = [library / f"{name}.py" for name in ("masking_utils", "modeling_rope_utils")]
    saved, read = config.to_dict(), dict[str, Any]()
    for file in (*shared, *own.glob("modeling_*.py")):
        read |= keys_read_in(file)
    known = {*saved, *PASSED_OVER, *type(config).attribute_map}
    for key, value in read.items():
        if key not in known and key[0] != "_" and not hasattr(type(config), key):
            others = [8, True] if value is None else candidates(key, value)
            yield key, key, [{**saved, key: each} for each in others]
    ropes = saved.get("rope_parameters") or {}
    for part in ROPE_PARTS if ropes.get("rope_type", "default") != "default" else ():
        if part not in ropes:
            others = [{**ropes, part: each} for each in candidates(part, None)]
            yield part, "rope_parameters", [{**saved, "rope_parameters": each} for each in others]


@functools.cache
def keys_read_in(file: Path) -> Mapping[str, Any]:
    """Not those that parts for images and sounds read."""
    found: dict[str, Any] = {}
    whole = ast.parse(file.read_text())
    own = [each for each in whole.body if not OTHER_PARTS.search(getattr(each, "name", ""))]
    for node in (node for each in own for node in ast.walk(each)):
        match node:
            case ast.Attribute(value=ast.Name(id="config") | ast.Attribute(attr="config")):
                found.setdefault(node.attr, None)
            case ast.Call(
                func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=key), *rest]
            ):
                if ast.unparse(owner) in ("config", "self.config"):
                    found[str(key)] = ast.literal_eval(rest[0]) if is_constant(rest) else None
            case _:
                pass
    return found


def is_constant(nodes: list[ast.expr]) -> bool:
    return bool(nodes) and isinstance(nodes[0], ast.Constant)


def model_of(config: Mapping[str, Any], family: Family) -> Any:
    """A model whose tensors depend on their names and shapes alone. None if there is none."""
    import transformers

    model_type = family.case.model_type
    values = {k: v for k, v in config.items() if k not in ("model_type", "transformers_version")}
    try:
        made = transformers.CONFIG_MAPPING[model_type](**values)
        made._attn_implementation = "sdpa" if model_type == "falcon" else "eager"
        model = getattr(transformers, MAKERS[family.kind]).from_config(made).eval()
    except Exception:  # noqa: BLE001  whatever it raises, there is no such model
        return None
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in (*parameters.items(), *model.named_buffers()):
            is_buffer = "." not in name or name not in parameters
            if is_buffer and not name.endswith(("e_score_correction_bias", "layer_scalar")):
                continue
            seed = zlib.crc32(f"{name}{list(tensor.shape)}".encode())
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.2
            tensor.copy_(noise + 1.0 if is_factor(name) else noise)
    return model


def outputs_of(model: Any, case: Case) -> torch.Tensor | None:
    """None if it cannot compute."""
    tokens = TOKENS[:, : case.max_positions].clamp(max=model.config.vocab_size - 1)
    try:
        with torch.inference_mode():
            outputs = model(tokens, use_cache=False)
            return outputs["logits" if "logits" in outputs else "last_hidden_state"][0]
    except Exception:  # noqa: BLE001  whatever it raises, there is nothing to compare
        return None


def differ(found: torch.Tensor, other: torch.Tensor, by: float) -> bool:
    if found.shape != other.shape:
        return True
    return not bool((found - other).abs().max() <= by * other.abs().max())


def first_that_changes(
    configs: list[dict[str, Any]], family: Family, before: torch.Tensor
) -> tuple[Any, torch.Tensor] | None:
    for config in configs:
        model = model_of(config, family)
        found = None if model is None else outputs_of(model, family.case)
        if found is not None and found.isfinite().all() and differ(found, before, CHANGE):
            return model, found
    return None


@pytest.mark.parametrize(
    "family",
    FAMILIES if SCALE > 1 else USUAL,
    ids=lambda family: f"{family.case.name}-{family.kind}",
)
def test_no_key_is_passed_over(family: Family, tmp_path: Path) -> None:
    base = model_of(family.config, family)
    before = outputs_of(base, family.case)
    assert before is not None
    both = (*changes(base.config.to_dict()), *unlisted(base.config))
    compared: list[str] = []
    wrong: list[str] = []
    for number, (key, above, configs) in enumerate(both):
        if (family.case.name, key) in BY_LENGTH:
            continue
        found = first_that_changes(configs, family, before)
        if found is None:
            continue
        compared.append(key)
        folder = tmp_path / str(number)
        found[0].save_pretrained(folder)
        problem = problem_of(folder, family, found[1], (key, above))
        if problem is not None:
            value = json.loads((folder / "config.json").read_text()).get(above)
            wrong.append(f"{key} (now {above}={value}): {problem}")
    assert len(compared) >= 5
    assert not wrong, "\n".join(wrong)


def test_every_architecture_is_covered() -> None:
    """Turns red when an architecture is registered whose keys no test changes."""
    covered = {family.architecture for family in FAMILIES}
    assert set(ARCHITECTURES) == covered | set(SPELLINGS) | set(HEADLESS)
    assert {*SPELLINGS.values(), *HEADLESS.values()} <= covered


@pytest.mark.parametrize("name", [*SPELLINGS, *HEADLESS])
def test_spellings_mean_the_same(name: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    other = SPELLINGS.get(name) or HEADLESS[name]
    family = next(each for each in FAMILIES if each.architecture == other)
    config: Any = CONFIG_MAPPING[family.case.model_type](**family.config)

    def read(architecture: str) -> ModelSpec:
        whole = {**config.to_dict(), "architectures": [architecture], "dtype": "float32"}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        return read_model_spec(tmp_path)

    wanted = read(other).without_head() if name in HEADLESS else read(other)
    assert read(name) == replace(wanted, architecture=name)


def problem_of(
    folder: Path, family: Family, wanted: torch.Tensor, keys: tuple[str, str]
) -> str | None:
    try:
        model = PagedModel(folder, "reference", family.case.max_positions)
    except ConfigError as error:
        names = (*keys, *(NAMED_BY[key] for key in keys if key in NAMED_BY))
        named = any(re.search(rf"(?<![\w.]){re.escape(name)}\b", str(error)) for name in names)
        return None if named else f"refused without its name: {error}"
    tokens = TOKENS[0, : family.case.max_positions].clamp(max=model.spec.vocab_size - 1)
    found = computed(model, tokens.tolist(), family.kind)
    return (
        f"differs by {(found - wanted).abs().max():.1e}"
        if differ(found, wanted, TOLERANCE)
        else None
    )


def computed(model: PagedModel, tokens: list[int], kind: Kind) -> torch.Tensor:
    if kind == "logits":
        return model.step({0: tokens})[0]
    hidden = model.hidden({0: tokens})
    if kind == "vectors":
        return hidden
    assert isinstance(model.model, Classifies)
    place = 0 if model.spec.is_encoder else -1
    with torch.inference_mode():
        return model.model.scores(hidden[place:][:1])[0]
