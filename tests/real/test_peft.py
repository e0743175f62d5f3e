"""Adapters that PEFT itself makes and saves answer as PEFT computes them.

`pip install peft` first: it is no dependency, and these tests are skipped without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lora.test_adapters import FAMILIES, LLAMA, PROMPTS, engine
from tests.models.families import write_checkpoint

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
GREEDY = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)


def adapted(family: str, folder: Path, **config: Any) -> Any:
    """A base model in `folder`/base with an adapter in `folder`/adapter, as PEFT computes it."""
    model = write_checkpoint(FAMILIES[family][0], folder / "base")
    transposed = family == "gpt2"
    made = peft.LoraConfig(
        task_type="CAUSAL_LM", fan_in_fan_out=transposed, **{"r": 4, "lora_alpha": 8, **config}
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(model, made)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "adapter")
    return model.eval()


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
