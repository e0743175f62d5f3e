"""Parts that few adapters have: matrices of experts, embeddings, logits and biases, permuted
projections.

Expected is a base model into whose tensors the adapter was merged by the formulas, in torch.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora.adapters import CONFIG, merge, modules_of, write_adapter
from tests.lora.test_adapters import LLAMA, PROMPTS, answers, assert_close, engine
from tests.models.families import Case, write_checkpoint
from tests.pairs import LAWS_BY_PAIRS
from tests.runner.test_token_columns import KERNELS
from torch.utils._python_dispatch import TorchDispatchMode

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, RequestError
from quire.base.platform import detect_platform
from quire.compute.layers.adapted import AdaptedLayers
from quire.compute.layers.token_columns import TokenColumn
from quire.compute.lora.bank import HostAdapter
from quire.config.adapters.peft import read_adapter
from quire.lora.request import LoRARequest
from quire.ops import build_op_set

pytestmark = LAWS_BY_PAIRS

RANK, SCALE = 4, 2.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
Tensors = dict[str, torch.Tensor]
MIXTURES = {
    "qwen3_moe": Case("qwen3-moe", "qwen3_moe"),
    "qwen2_moe": Case("qwen2-moe", "qwen2_moe"),
    "mixtral": Case("mixtral", "mixtral"),
    "gpt_oss": Case("gpt-oss", "gpt_oss"),
}


def written(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> LoRARequest:
    """An adapter of these tensors, by names without PEFT's prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": each.contiguous() for name, each in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    stated = {**CONFIG, "r": RANK, "lora_alpha": RANK * SCALE, "target_modules": ["x"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return LoRARequest(folder.name, 1, str(folder))


def changed(folder: Path, base: Path, changes: Mapping[str, torch.Tensor]) -> Path:
    """The base model with other tensors; of a tied one with a head of its own."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    if "lm_head.weight" in changes and "lm_head.weight" not in weights:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    save_file({**weights, **changes}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("module", "plain"),
    [
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("language_model.model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("model.language_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("language_model.lm_head", "lm_head"),
        ("lm_head", "lm_head"),
    ],
)
def test_names_of_text_parts_are_those_of_text_alone(
    module: str, plain: str, tmp_path: Path
) -> None:
    """Catches an adapter of a multimodal model that is refused, or changes nothing: names differ
    between versions of transformers."""
    sides = {f"{module}.lora_{side}.weight": noise(RANK, RANK) for side in "AB"}
    made = written(tmp_path / "adapter", sides)
    assert list(read_adapter(Path(made.lora_path)).modules) == [plain]


@pytest.mark.parametrize("kind", ["lora_A.weight", "lora_embedding_A", "bias", "weight"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_two_modules_of_one_name_are_refused(kind: str, prefix: str, tmp_path: Path) -> None:
    """Fault: the last one replaced the others."""
    names = [f"{start}layers.0.self_attn.q_proj.{kind}" for start in ("model.", prefix)]
    kinds = [kind, kind.replace("_A", "_B")] if "_A" in kind else [kind]
    shape = (RANK,) if kind == "bias" else (RANK, RANK)
    sides = {name.replace(kind, each): noise(*shape) for name in names for each in kinds}
    made = written(tmp_path / "adapter", sides)
    with pytest.raises(ConfigError, match="are both of"):
        read_adapter(Path(made.lora_path))


@pytest.mark.parametrize("kind", ["lora_{}.weight", "lora_embedding_{}"])
def test_patterns_are_of_the_names_in_the_base(kind: str, tmp_path: Path) -> None:
    """Catches a factor or a rank that counts for nothing, as the text part has shorter names here.
    Patterns match from the beginning or after a dot, to the end."""
    module = "model.language_model.layers.0.mlp.up_proj"
    sides = {f"{module}.{kind.format(side)}": noise(RANK, RANK) for side in "AB"}
    met = (module, "up_proj", "language_model.*_proj", r"model\.[a-z_]+\.layers\.\d+\.mlp\.up_proj")
    for number, pattern in enumerate((*met, "model.layers.0.mlp.up_proj")):
        rank, alpha = (RANK + 1, 64) if pattern in met else (RANK, 8)
        patterns = {"alpha_pattern": {pattern: 64}, "rank_pattern": {pattern: RANK}}
        made = written(tmp_path / f"{number}", sides, r=rank, lora_alpha=8, **patterns)
        read = read_adapter(Path(made.lora_path))
        ((name, pair),) = {**read.modules, **read.tables}.items()
        assert (name, pair.scale) == ("model.layers.0.mlp.up_proj", alpha / RANK), pattern


def noise(*shape: int, seed: int = 0, std: float = 0.3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def assert_answers(base: Path, lora: LoRARequest, merged: Path) -> None:
    """Rows with the adapter answer as the merged model, and rows beside them keep their bits."""
    with engine(merged) as llm:
        expected = answers(llm, PROMPTS)
    with engine(base) as llm:
        plain = answers(llm, PROMPTS)
    with engine(base, enable_lora=True) as llm:
        assert_close(answers(llm, PROMPTS, lora_request=lora), expected)
        mixed = answers(llm, PROMPTS, lora_request=[lora, None, lora, None])
        assert answers(llm, PROMPTS) == plain
    assert expected != plain
    assert_close([mixed[0], mixed[2]], [expected[0], expected[2]])
    if KERNELS:
        assert [mixed[1], mixed[3]] == [plain[1], plain[3]]


@pytest.mark.parametrize("family", MIXTURES)
def test_attention_of_a_mixture(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_checkpoint(MIXTURES[family], base)
    folder = write_adapter(tmp_path / "adapter", base, ATTENTION)
    merged = merge(tmp_path / "merged", base, folder, {"": 2})
    assert_answers(base, LoRARequest("a", 1, str(folder)), merged)


def experts_on_disk(base: Path) -> dict[str, torch.Tensor]:
    """Weights of experts by name, each [outputs, inputs], or of all experts together."""
    weights = load_file(base / "model.safetensors")
    return {name: each for name, each in weights.items() if ".experts." in name and each.dim() > 1}


def test_one_module_per_expert(tmp_path: Path) -> None:
    """The layout of `transformers` 4: some experts, all three projections of two of them."""
    base = tmp_path / "base"
    write_checkpoint(MIXTURES["qwen3_moe"], base)
    tensors: Tensors = {}
    changes: Tensors = {}
    for i, (name, weight) in enumerate(experts_on_disk(base).items()):
        module, number = name.removesuffix(".weight"), int(name.split(".experts.")[1][0])
        if number not in (0, 3) and not name.endswith("down_proj.weight"):
            continue
        a, b = noise(RANK, weight.shape[1], seed=i), noise(weight.shape[0], RANK, seed=99 + i)
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        changes[name] = weight + SCALE * b @ a
    lora = written(tmp_path / "a", tensors)
    assert_answers(base, lora, changed(tmp_path / "merged", base, changes))


def stacked_deltas(a: torch.Tensor, b: torch.Tensor, count: int) -> torch.Tensor:
    """[E, O, I] of A [E·r, I] and B [O, r·E], by one expert after the other."""
    rank = len(a) // count
    return torch.stack([
        SCALE * b[:, [j * count + e for j in range(rank)]] @ a[e * rank : (e + 1) * rank]
        for e in range(count)
    ])  # fmt: skip


@pytest.mark.parametrize("version", ["0.21.2", "0.17.0"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_matrices_of_all_experts(family: str, version: str, tmp_path: Path) -> None:
    """`target_parameters`. Old versions of PEFT took [E, O, I] for [E, I, O]."""
    base = tmp_path / "base"
    write_checkpoint(MIXTURES[family], base)
    names = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
    gate, up, down = names[family]
    weights = load_file(base / "model.safetensors")
    count = 6 if family == "qwen3_moe" else 5
    tensors: Tensors = {}
    changes: Tensors = {}
    for layer in range(2):
        middle = "mlp" if family == "qwen3_moe" else "block_sparse_moe"
        on_disk = f"model.layers.{layer}.{middle}.experts"
        for seed, (wrapped, parts) in enumerate(((".base_layer", (gate, up)), ("", (down,)))):
            matrices = [weights[f"{on_disk}.0.{part}.weight"] for part in parts]
            outputs, inputs = sum(len(each) for each in matrices), matrices[0].shape[1]
            is_old = version == "0.17.0"
            shape = (outputs, inputs) if is_old else (inputs, outputs)
            a = noise(RANK * count, shape[0], seed=seed)
            b = noise(shape[1], RANK * count, seed=7 + seed)
            module = f"model.layers.{layer}.mlp.experts{wrapped}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            deltas = stacked_deltas(a, b, count)
            deltas = deltas.transpose(1, 2) if is_old else deltas
            for expert in range(count):
                for part, delta in zip(parts, deltas[expert].chunk(len(parts)), strict=True):
                    name = f"{on_disk}.{expert}.{part}.weight"
                    changes[name] = weights[name] + delta
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = written(
        tmp_path / "a", tensors, target_modules=[], target_parameters=targets, peft_version=version
    )
    assert_answers(base, lora, changed(tmp_path / "merged", base, changes))


@pytest.mark.parametrize("version", ["0.21.2", "0.17.0"])
def test_experts_of_gpt_oss(version: str, tmp_path: Path) -> None:
    """Its matrices are [E, I, O] on disk, and rows of gate and up take turns."""
    base = tmp_path / "base"
    write_checkpoint(MIXTURES["gpt_oss"], base)
    tensors: Tensors = {}
    changes: Tensors = {}
    for seed, (name, weight) in enumerate(experts_on_disk(base).items()):
        if name.endswith("_bias"):
            continue
        count, inputs, outputs = weight.shape
        owner, _, parameter = name.rpartition(".")
        module = owner + (".base_layer" if parameter == "gate_up_proj" else "")
        a, b = noise(RANK * count, inputs, seed=seed), noise(outputs, RANK * count, seed=9 + seed)
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        changes[name] = weight + stacked_deltas(a, b, count).transpose(1, 2)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    lora = written(tmp_path / "a", tensors, target_parameters=targets, peft_version=version)
    assert_answers(base, lora, changed(tmp_path / "merged", base, changes))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(Case("qwen2", "qwen2"), folder)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    write_checkpoint(Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True}), folder)
    return folder


def of_embedding(base: Path, kind: str) -> tuple[Tensors, Tensors]:
    """Tensors of an adapter, and what they change."""
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    if kind == "whole":
        new = noise(*table.shape)
        return {"model.embed_tokens.weight": new}, {"model.embed_tokens.weight": new}
    a, b = noise(RANK, table.shape[0]), noise(table.shape[1], RANK, seed=1)
    name = "model.embed_tokens.lora_embedding_"
    tensors = {f"{name}A": a, f"{name}B": b, "model.embed_tokens.base_layer.weight": table}
    return tensors, {"model.embed_tokens.weight": table + SCALE * (b @ a).t()}


def of_head(base: Path, kind: str) -> tuple[Tensors, Tensors]:
    weights = load_file(base / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    if kind == "whole":
        new = noise(*head.shape, seed=2)
        return {"lm_head.weight": new}, {"lm_head.weight": new}
    a, b = noise(RANK, head.shape[1], seed=3), noise(head.shape[0], RANK, seed=4)
    tensors = {"lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b}
    return tensors, {"lm_head.weight": head + SCALE * b @ a}


def of_all(base: Path) -> tuple[Tensors, Tensors]:
    (first, changes), (second, others) = of_embedding(base, "low rank"), of_head(base, "whole")
    return {**first, **second}, {**changes, **others}


@pytest.mark.parametrize("kind", ["low rank", "whole"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings(base: Path, tied: Path, kind: str, is_tied: bool, tmp_path: Path) -> None:
    """The head of a tied model keeps the base's table."""
    base = tied if is_tied else base
    tensors, changes = of_embedding(base, kind)
    if is_tied:
        kept = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
        changes = {"lm_head.weight": kept, **changes}
    assert_answers(base, written(tmp_path / "a", tensors), changed(tmp_path / "m", base, changes))


@pytest.mark.parametrize("kind", ["low rank", "whole"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_heads(base: Path, tied: Path, kind: str, is_tied: bool, tmp_path: Path) -> None:
    base = tied if is_tied else base
    tensors, changes = of_head(base, kind)
    assert_answers(base, written(tmp_path / "a", tensors), changed(tmp_path / "m", base, changes))


@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_new_rows_of_tokens(
    base: Path, tied: Path, is_tied: bool, by_module: bool, tmp_path: Path
) -> None:
    """`trainable_token_indices`: whole rows, of a tied model in the head too."""
    base, tokens = tied if is_tied else base, [*dict.fromkeys((*PROMPTS[0], *PROMPTS[2], 1))][:4]
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    rows = noise(len(tokens), table.shape[1])
    whole = table.clone()
    whole[tokens] = rows
    changes = {"model.embed_tokens.weight": whole}
    if is_tied:
        changes["lm_head.weight"] = whole.clone()
    stated: Any = {"embed_tokens": tokens} if by_module else tokens
    tensors = {"model.embed_tokens.token_adapter.trainable_tokens_delta": rows}
    lora = written(tmp_path / "a", tensors, trainable_token_indices=stated)
    assert_answers(base, lora, changed(tmp_path / "m", base, changes))
    with pytest.raises(ConfigError, match="names 3 tokens for the 4 rows"):
        read_adapter(Path(written(tmp_path / "b", tensors, trainable_token_indices=[1, 2, 3]).path))


def test_a_tied_head_may_have_rows_of_its_own(tied: Path, tmp_path: Path) -> None:
    """Fault: rows of the table took their place."""
    table = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    stated = {"embed_tokens": [*dict.fromkeys(PROMPTS[0])][:2], "lm_head": [5, 6, 7]}
    tensors, changes = Tensors(), Tensors()
    for module, name in (("model.embed_tokens", "embed_tokens"), ("lm_head", "lm_head")):
        rows = noise(len(stated[name]), table.shape[1], seed=len(name))
        tensors[f"{module}.token_adapter.trainable_tokens_delta"] = rows
        changes[f"{module}.weight"] = table.index_copy(0, torch.tensor(stated[name]), rows)
    lora = written(tmp_path / "a", tensors, trainable_token_indices=stated)
    assert_answers(tied, lora, changed(tmp_path / "m", tied, changes))


@pytest.mark.parametrize(
    ("count", "stated"),
    [(0, []), (0, {"embed_tokens": []}), (None, [1, 2]), (None, {"embed_tokens": [1, 2]}),
     (2, {"embed_tokens": [1, 2], "lm_head": [3]})],
)  # fmt: skip
def test_tokens_without_rows_are_refused(count: int | None, stated: Any, tmp_path: Path) -> None:
    """Faults: no row ended in a ValueError, and tokens whose rows are not there kept the base's."""
    tensors = {f"model.layers.0.self_attn.q_proj.lora_{side}.weight": noise(4, 4) for side in "AB"}
    if count is not None:
        tensors["model.embed_tokens.token_adapter.trainable_tokens_delta"] = noise(count, 16)
    lora = written(tmp_path / "a", tensors, trainable_token_indices=stated)
    with pytest.raises(ConfigError, match=r"trainable_token_indices.* names \d tokens"):
        read_adapter(Path(lora.path))


def test_rows_that_a_tied_head_shares_are_saved_once(tmp_path: Path) -> None:
    rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta": noise(2, 16)}
    stated = {"embed_tokens": [1, 2], "lm_head": [1, 2]}
    lora = written(tmp_path / "a", rows, trainable_token_indices=stated)
    assert [*read_adapter(Path(lora.path)).tokens] == ["model.embed_tokens"]


class LargestTensor(TorchDispatchMode):
    """The most numbers that a tensor has which torch makes meanwhile."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.size = max(self.size, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


@pytest.mark.skipif(not KERNELS, reason="torch widens a part at a time")
def test_a_whole_head_is_packed_once() -> None:
    """Turns red when each step makes float32 numbers of all its weights."""
    tokens, size = 300, 64
    ops, packed = build_op_set(detect_platform()), Mock()
    packed.side_effect = ops.linear
    column = TokenColumn("adapter")
    layers = AdaptedLayers(
        2, RANK, torch.bfloat16, torch.device("cpu"), column, ops.low_rank, packed
    )
    _, head = layers.vocabulary(tokens, size)
    weight, hidden = noise(tokens, size).bfloat16(), noise(3, size, seed=1).bfloat16()
    head.replace(0, weight)
    column.is_apart = True
    column.set(torch.tensor([1, 0, 1]))
    base = noise(3, tokens, seed=2)
    with LargestTensor() as largest:
        changed = [head.change(base.clone(), hidden) for _ in range(3)]
    assert packed.call_count == 1
    assert largest.size == 3 * tokens
    expected = torch.where(column.values[:, None] == 1, hidden.float() @ weight.float().t(), base)
    for logits in changed:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


BIASED = {
    "qwen2": Case("qwen2", "qwen2"),
    "gpt2": Case("gpt2", "gpt2"),
    "opt": Case("opt", "opt"),
    "llama": Case("llama-bias", "llama", {"attention_bias": True, "mlp_bias": True}),
    "gpt_neox": Case("gpt-neox", "gpt_neox", {"rotary_pct": 0.5}),
}


@pytest.mark.parametrize("family", BIASED)
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases(family: str, bias: str, tmp_path: Path) -> None:
    """Norms have biases too. PEFT names the biases of adapted modules after what it has wrapped."""
    base = tmp_path / "base"
    write_checkpoint(BIASED[family], base)
    weights = load_file(base / "model.safetensors")
    found = [name for name in weights if name.endswith(".bias") and weights[name].dim() == 1]
    changes = {name: noise(*weights[name].shape, seed=i) for i, name in enumerate(found)}
    if bias == "lora_only":
        changes = {n: v for n, v in changes.items() if "norm" not in n and ".ln_" not in n}
    forms = ("bias", "base_layer.bias")
    tensors = {
        name.removesuffix("bias") + forms[i % 2]: each
        for i, (name, each) in enumerate(changes.items())
    }
    lora = written(tmp_path / "a", tensors, bias=bias)
    assert_answers(base, lora, changed(tmp_path / "merged", base, changes))


ORDERED = {
    "phi3": (Case("phi3", "phi3"), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "glm4": (Case("glm4", "glm4"), (*ATTENTION, "gate_up_proj", "down_proj")),
    "cohere": (Case("cohere", "cohere"), LLAMA),
    "gpt_neox": (
        Case("gpt-neox", "gpt_neox", {"rotary_pct": 0.5}),
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
}


@pytest.mark.parametrize("family", ORDERED)
def test_merged_and_permuted_projections(family: str, tmp_path: Path) -> None:
    case, names = ORDERED[family]
    base = tmp_path / "base"
    write_checkpoint(case, base)
    folder = write_adapter(tmp_path / "adapter", base, names)
    assert len(modules_of(base, names)) == len(names) * 2
    merged = merge(tmp_path / "merged", base, folder, {"": 2})
    assert_answers(base, LoRARequest("a", 1, str(folder)), merged)


INT8 = {"quantization": "int8"}
FORMATS = [{"dtype": "bfloat16"}, INT8, {**INT8, "activation_bits": 16}, {"kv_cache_dtype": "int8"}]


@pytest.mark.parametrize("settings", FORMATS, ids=str)
def test_parts_over_other_formats(settings: dict[str, Any], tmp_path: Path) -> None:
    """Turns red when a bias counts twice, as where a cache in 8 bits does without it. What formats
    round is far below the effect of the adapter, which is above 2."""
    base = tmp_path / "base"
    write_checkpoint(Case("qwen2", "qwen2", {"hidden_size": 64}), base)
    tensors, changes = of_all(base)
    weights = load_file(base / "model.safetensors")
    biases = [name for name in weights if name.endswith(".bias")]
    new = {name: noise(*weights[name].shape, seed=i) for i, name in enumerate(biases)}
    lora = written(tmp_path / "a", {**tensors, **new}, bias="all")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)

    def found(model: Path, **more: Any) -> list[dict[int, float]]:
        common = {"dtype": "float32", "skip_tokenizer_init": True, "quiet": True, **settings}
        asked = lora if more else None
        with LLM(str(model), **common, num_kv_blocks=64, max_model_len=64, **more) as llm:
            outputs = llm.generate(list(PROMPTS), params, use_tqdm=False, lora_request=asked)
        entries = [(output.outputs[0].logprobs or [])[0] for output in outputs]
        return [{token: each.logprob for token, each in entry.items()} for entry in entries]

    expected = found(changed(tmp_path / "merged", base, {**changes, **new}))
    for mine, theirs in zip(found(base, enable_lora=True), expected, strict=True):
        shared = mine.keys() & theirs.keys()
        assert len(shared) >= 3
        assert all(abs(mine[token] - theirs[token]) < 0.3 for token in shared)


def test_a_slot_forgets_its_adapter(base: Path, tmp_path: Path) -> None:
    """One slot for an adapter of everything, and for one of a projection."""
    everything = written(tmp_path / "all", of_all(base)[0])
    folder = write_adapter(tmp_path / "plain", base, ("v_proj",))
    plain = LoRARequest("plain", 2, str(folder))
    with engine(base, enable_lora=True, max_loras=1) as llm:
        expected = [answers(llm, PROMPTS, lora_request=each) for each in (plain, everything)]
        for _ in range(2):
            got = [answers(llm, PROMPTS, lora_request=each) for each in (plain, everything)]
            assert got == expected
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm, PROMPTS, lora_request=everything) == expected[1]
    with engine(base, enable_lora=True) as llm:
        assert answers(llm, PROMPTS, lora_request=plain) == expected[0]


def test_adapters_in_memory_do_not_need_their_file(base: Path, tmp_path: Path) -> None:
    """Catches tensors that stay mapped: a copy over the file changes them, and reading what a
    shorter one left out ends the process."""
    lora = written(tmp_path / "a", of_all(base)[0])
    with engine(base, enable_lora=True) as llm:
        answers(llm, PROMPTS[:1], lora_request=lora)
        (kept,) = (
            each
            for each in gc.get_objects()
            if type(each) is HostAdapter and each.ref.path == lora.lora_path
        )
        pairs = [*kept.tensors.matrices.values(), *kept.tensors.tables.values()]
        tensors = [each for pair in pairs for each in (pair.a, pair.b)]
        tensors += [*kept.tensors.whole.values(), *kept.tensors.biases.values()]
        before = [tensor.clone() for tensor in tensors]
        file = Path(lora.lora_path) / "adapter_model.safetensors"
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
        assert all(map(torch.equal, tensors, before))


def test_log_probabilities_of_prompts(base: Path, tmp_path: Path) -> None:
    """Heads see the rows of tokens that are picked out of a step."""
    tensors, changes = of_all(base)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)

    def found(llm: LLM, **more: Any) -> list[list[float]]:
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False, **more)
        return [
            [
                entry[token].logprob
                for token, entry in zip(prompt[1:], each[1:], strict=True)
                if entry is not None
            ]
            for prompt, output in zip(PROMPTS, outputs, strict=True)
            if (each := output.prompt_logprobs) is not None
        ]

    with engine(changed(tmp_path / "merged", base, changes)) as llm:
        expected = found(llm)
    with engine(base) as llm:
        plain = found(llm)
    lora = written(tmp_path / "a", tensors)
    with engine(base, enable_lora=True, max_num_batched_tokens=8) as llm:
        got = found(llm, lora_request=[None, lora, lora, None])
    wanted = [plain[0], expected[1], expected[2], plain[3]]
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings", [{"depth": 1}, {"depth": 3}, {"num_kv_blocks": 9, "block_size": 8}]
)
def test_a_batch_of_all_kinds_equals_each_alone(
    base: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    loras = (
        None,
        written(tmp_path / "all", of_all(base)[0]),
        written(tmp_path / "head", of_head(base, "low rank")[0]),
        LoRARequest("plain", 4, str(write_adapter(tmp_path / "plain", base, LLAMA))),
    )
    asked = [(prompt, lora) for prompt in PROMPTS for lora in loras]
    common: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "quiet": True, "max_model_len": 64,
        "num_kv_blocks": 200, "enable_lora": True, "max_loras": 2,
    }  # fmt: skip
    with LLM(str(base), **common) as llm:
        alone = [answers(llm, [prompt], lora_request=lora)[0] for prompt, lora in asked]
    with LLM(str(base), **{**common, **settings}) as llm:
        together = answers(llm, [p for p, _ in asked], lora_request=[lora for _, lora in asked])
    assert_close(together, alone, 1e-4)


def test_parts_that_cannot_be_changed_are_named(base: Path, tied: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    write_checkpoint(MIXTURES["gpt_oss"], mixture)
    router = {"lora_A.weight": noise(RANK, 32), "lora_B.weight": noise(5, RANK)}
    stacked = {"lora_A.weight": noise(RANK * 5, 33), "lora_B.weight": noise(64, RANK * 5)}
    layer = "model.layers.0"
    rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta": noise(2, 32)}
    tokens = {"trainable_token_indices": [1, 2]}
    cases: list[tuple[Path, Tensors, dict[str, Any], str]] = [
        (base, {"model.norm.weight": noise(32)}, {}, "'model.norm', which adapters cannot change"),
        (base, {"lm_head.weight": noise(129, 32)}, {}, "another base model"),
        (base, {f"{layer}.mlp.up_proj.bias": noise(48)}, {}, "bias of 'model.layers.0.mlp"),
        (base, {"lm_head.lora_B.bias": noise(128)}, {}, "lora_bias"),
        (mixture, {f"{layer}.mlp.router.{k}": v for k, v in router.items()}, {}, "mlp.router"),
        (
            mixture, {f"{layer}.mlp.experts.{k}": v for k, v in stacked.items()},
            {"target_parameters": ["experts.down_proj"]}, "but experts have",
        ),
        (mixture, {f"{layer}.mlp.router.bias": noise(5)}, {}, "the bias of 'model.layers.0.mlp.r"),
        (
            mixture, {f"{layer}.mlp.experts.gate_up_proj_bias": noise(5, 96)}, {"bias": "all"},
            "no low-rank matrix",
        ),
        (base, {**of_embedding(base, "low rank")[0], **rows}, tokens, "embed_tokens' in two ways"),
        (base, {**of_embedding(base, "whole")[0], **rows}, tokens, "embed_tokens' in two ways"),
        (base, of_head(base, "whole")[0] | of_head(base, "low rank")[0], {}, "'lm_head' in two w"),
        (tied, {**of_head(tied, "whole")[0], **rows}, tokens, "'lm_head' in two ways"),
        (tied, {**of_head(tied, "low rank")[0], **rows}, tokens, "'lm_head' in two ways"),
    ]  # fmt: skip
    for number, (model, tensors, config, words) in enumerate(cases):
        lora = written(tmp_path / f"bad{number}", tensors, **config)
        with engine(model, enable_lora=True) as llm, pytest.raises(RequestError, match=words):
            llm.generate([1, 2], lora_request=lora)
