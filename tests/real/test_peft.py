"""Adapters that PEFT itself makes and saves answer as PEFT computes them.

`pip install peft` first: it is no dependency, and these tests are skipped without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lora.test_adapters import FAMILIES, LLAMA, PROMPTS, engine
from tests.models.families import Case, write_checkpoint
from transformers import AutoModelForCausalLM

from quire import SamplingParams
from quire.lora.request import LoRARequest

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
"""PEFT and the installed `transformers` may be of different times."""

KINDS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*layers\.0\.(self_attn|mlp)\.(q_proj|up_proj)"},
    "rslora": {"target_modules": list(LLAMA), "use_rslora": True, "r": 6},
    "patterns": {
        "target_modules": list(LLAMA), "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 7},
        "alpha_pattern": {"down_proj": 32},
    },
    "one layer": {"target_modules": list(LLAMA), "layers_to_transform": [1]},
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
MIXTURES = {
    "qwen3_moe": Case("qwen3-moe", "qwen3_moe"),
    "mixtral": Case("mixtral", "mixtral"),
    "gpt_oss": Case("gpt-oss", "gpt_oss"),
}
OTHERS = {
    "qwen2": Case("qwen2", "qwen2"),
    "qwen2-tied": Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
    "phi3": Case("phi3", "phi3"),
    "glm4": Case("glm4", "glm4"),
    "cohere": Case("cohere", "cohere"),
    "gpt_neox": Case("gpt-neox", "gpt_neox", {"rotary_pct": 0.5}),
}
CASES = {**{name: case for name, (case, _) in FAMILIES.items()}, **MIXTURES, **OTHERS}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding": ("qwen2", {"target_modules": ["embed_tokens"]}),
    "embedding, scaled": ("gemma3", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding, tied": ("qwen2-tied", {"target_modules": ["embed_tokens", "v_proj"]}),
    "head": ("qwen2", {"target_modules": ["lm_head"]}),
    "head, tied": ("qwen2-tied", {"target_modules": ["lm_head", "v_proj"]}),
    "gpt2's": ("gpt2", {"target_modules": ["wte", "lm_head", "c_attn"]}),
    "saved": (
        "qwen2", {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    ),
    "saved head": ("qwen2", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "saved, tied": (
        "qwen2-tied", {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}
    ),
    "all biases": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "bias": "all"}),
    "opt's biases": ("opt", {"target_modules": ["v_proj", "fc1"], "bias": "all"}),
    "own biases": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)


def adapted(family: str, folder: Path, **config: Any) -> Any:
    """A base model in `folder`/base with an adapter in `folder`/adapter, as PEFT computes what it
    has saved."""
    model = write_checkpoint(CASES[family], folder / "base")
    transposed = family == "gpt2"
    made = peft.LoraConfig(
        task_type="CAUSAL_LM", fan_in_fan_out=transposed, **{"r": 4, "lora_alpha": 8, **config}
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(model, made)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
        elif parameter.requires_grad:  # biases, and what is saved whole
            with torch.no_grad():
                parameter += torch.randn(parameter.shape) * 0.3
    model.save_pretrained(folder / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, folder / "adapter").eval()


def assert_as_peft(model: Any, folder: Path) -> None:
    lora = LoRARequest("a", 1, str(folder / "adapter"))
    with engine(folder / "base", enable_lora=True) as llm:
        outputs = llm.generate(list(PROMPTS), GREEDY, use_tqdm=False, lora_request=lora)
    effect = 0.0  # q and k change nothing where all tokens are the same
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad(), model.disable_adapter():
            plain = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        effect = max(effect, float((plain - expected).abs().max()))
        assert output.outputs[0].logprobs is not None
        (entry,) = output.outputs[0].logprobs
        for token, found in entry.items():
            assert abs(found.logprob - float(expected[token])) <= 1e-4
    assert effect > 0.1


@pytest.mark.parametrize(
    ("family", "name"),
    [(f, n) for f in ("llama", "qwen3", "gemma3", "gpt2") for n in FAMILIES[f][1]],
)
def test_each_target_module(family: str, name: str, tmp_path: Path) -> None:
    assert_as_peft(adapted(family, tmp_path, target_modules=[name]), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_configurations(kind: str, tmp_path: Path) -> None:
    assert_as_peft(adapted("llama", tmp_path, **KINDS[kind]), tmp_path)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("kind", ["attention", "experts", "both"])
def test_mixtures_of_experts(family: str, kind: str, tmp_path: Path) -> None:
    modules = [] if kind == "experts" else list(ATTENTION)
    config: dict[str, Any] = {"target_modules": modules, **(EXPERTS if kind != "attention" else {})}
    assert_as_peft(adapted(family, tmp_path, **config), tmp_path)


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_one_matrix_of_experts(parameter: str, tmp_path: Path) -> None:
    names = [f"mlp.experts.{parameter}"]
    model = adapted("qwen3_moe", tmp_path, target_modules=[], target_parameters=names)
    assert_as_peft(model, tmp_path)


@pytest.mark.parametrize("kind", PARTS)
def test_embeddings_heads_and_biases(kind: str, tmp_path: Path) -> None:
    family, config = PARTS[kind]
    assert_as_peft(adapted(family, tmp_path, **config), tmp_path)


@pytest.mark.parametrize("family", ["phi3", "glm4", "cohere", "gpt_neox"])
def test_merged_and_permuted_projections(family: str, tmp_path: Path) -> None:
    assert_as_peft(adapted(family, tmp_path, target_modules="all-linear"), tmp_path)
