"""Plans of models that several ranks hold together."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from quire.base.errors import ConfigError
from quire.config import read_model_spec
from quire.config.memory.ranks import check_rank_invariant, check_ranks, describe_rank
from quire.config.model_spec import ModelSpec
from quire.config.render_plan import render_plan
from quire.config.resolve import resolve
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from tests.config.specs import GIB, make_gpu_platform, make_platform, make_spec
from tests.models.families import GEMMA4_EXPERTS, Case, write_checkpoint
from tests.models.family_bases import BASES


def settings(size: int = 2, **more: Any) -> EngineSettings:
    return EngineSettings(tensor_parallel_size=size, **more)


def test_ranks_share_the_memory_and_the_cores() -> None:
    """Turns red when two ranks take the memory, or start the threads, of two machines."""
    spec, platform = make_spec(), make_platform(num_cores=8)
    one = resolve(settings(1), spec, None, platform)
    two = resolve(settings(2), spec, None, platform)
    assert two.settings.num_threads == 4
    assert two.memory.page * 2 == one.memory.page
    assert two.memory.total * 2 < 0.9 * platform.free_bytes
    assert two.layout == one.layout  # one bookkeeping for all ranks


def test_ranks_on_other_hosts_share_neither() -> None:
    """Turns red when rank 0 leaves half of its host to ranks that Ray places elsewhere."""
    spec, platform = make_spec(), make_platform(num_cores=8, free_bytes=3 * GIB // 2)
    here = resolve(settings(2), spec, None, platform)
    by_ray = settings(2, distributed_executor_backend="ray")
    there = resolve(by_ray, spec, None, platform)
    assert (here.settings.num_threads, there.settings.num_threads) == (4, 8)
    assert there.memory.page == here.memory.page
    assert there.settings.num_kv_blocks > here.settings.num_kv_blocks


def test_a_cache_of_a_given_size_is_that_of_all_ranks() -> None:
    spec = make_spec()
    one = resolve(settings(1, kv_cache_memory=GIB), spec, None, make_platform())
    two = resolve(settings(2, kv_cache_memory=GIB), spec, None, make_platform())
    assert two.settings.num_kv_blocks == one.settings.num_kv_blocks


def test_one_kv_head_lies_on_every_rank() -> None:
    spec = make_spec(num_kv_heads=1)
    one = resolve(settings(1), spec, None, make_platform())
    two = resolve(settings(2), spec, None, make_platform())
    assert two.memory.page == one.memory.page


def test_the_plan_says_what_a_rank_holds() -> None:
    """Turns red when `quire plan` shows the whole model for each rank, or nothing of ranks."""
    text = render_plan(resolve(settings(2), make_spec(), None, make_platform()))
    (line,) = [line for line in text.splitlines() if "tensor_parallel_size" in line]
    words = "2 of 4 query heads, 1 of 2 kv heads, 500 of 1,000 tokens,"
    assert words in line and "384 of 768 MLP neurons" in line
    assert "memory of a rank" in text
    alone = render_plan(resolve(settings(1), make_spec(), None, make_platform()))
    assert "rank" not in alone and "tensor_parallel_size" not in alone


def test_refusals_name_the_reason() -> None:
    with pytest.raises(ConfigError, match="4 query heads cannot be shared by 3 ranks"):
        resolve(settings(3), make_spec(), None, make_platform())
    with pytest.raises(ConfigError, match="ranks run on CPUs alone so far"):
        resolve(settings(2), make_spec(), None, make_gpu_platform())
    with pytest.raises(ConfigError, match="and a draft model do not go together"):
        check_ranks(settings(2), make_spec(), make_platform(), has_draft_model=True)
    other = replace(make_platform(), system="darwin")
    with pytest.raises(ConfigError, match="as Linux alone has it, and this is darwin"):
        check_ranks(settings(2), make_spec(), other, has_draft_model=False)


SHARED = "shared_expert_intermediate_size"
DOUBLE = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}


def spec_of(model_type: str, architecture: str, folder: Path, **changes: Any) -> ModelSpec:
    """The spec of a tiny model, without weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 2}
    config = {**BASES[model_type], **sizes, "model_type": model_type, **changes}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return read_model_spec(folder)


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes", "words"),
    [
        ("qwen2_moe", "Qwen2MoeForCausalLM", {SHARED: 39}, "39 shared MLP neurons"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, "63 MLP neurons"),
        ("gemma4_text", "Gemma4ForCausalLM", GEMMA4_EXPERTS, "63 MLP neurons"),
        ("gemma4_text", "Gemma4ForCausalLM", DOUBLE, "63 MLP neurons"),
    ],
    ids=["shared", "some-layers", "beside", "two-sizes"],
)
def test_neurons_beside_experts_and_of_each_layer_are_checked(
    model_type: str, architecture: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Turns red when a model whose MLP cannot be shared fails only while its layers are made."""
    inner = 64 if SHARED in changes else 63
    spec = spec_of(model_type, architecture, tmp_path, **changes, intermediate_size=inner)
    with pytest.raises(ConfigError, match=f": {words} cannot be shared by 2 ranks"):
        check_ranks(settings(2), spec, make_platform(), has_draft_model=False)


def test_neurons_that_no_layer_has_are_not_checked(tmp_path: Path) -> None:
    spec = spec_of("qwen3_moe", "Qwen3MoeForCausalLM", tmp_path, intermediate_size=63)
    check_ranks(settings(2), spec, make_platform(), has_draft_model=False)
    assert "neurons" not in describe_rank(spec, 2)


def test_a_rank_has_experts_and_neurons(tmp_path: Path) -> None:
    spec = spec_of("qwen2_moe", "Qwen2MoeForCausalLM", tmp_path, mlp_only_layers=[0])
    words = "3 of 6 experts, 32 of 64 MLP neurons, 20 of 40 shared MLP neurons"
    assert words in describe_rank(spec, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {**DOUBLE, "intermediate_size": 12},
            "12 neurons are no multiple of 8",
        ),
        ({"num_attention_heads": 2, "head_dim": 6}, "12 outputs of heads are no multiple of 8"),
    ],
)
def test_sums_of_each_layer_can_be_cut_in_pieces(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Turns red when only the largest layer is checked, and another one is cut unevenly."""
    asked, platform = settings(1, rank_invariant=True), replace(make_platform(), device="cpu")
    even = spec_of("gemma4_text", "Gemma4ForCausalLM", tmp_path, **DOUBLE)
    check_rank_invariant(asked, even, platform)
    spec = spec_of("gemma4_text", "Gemma4ForCausalLM", tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        check_rank_invariant(asked, spec, platform)


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", "llama", {"num_hidden_layers": 4}),
        Case("mqa-tied", "llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        Case("qwen2", "qwen2"),
        Case("mixtral", "mixtral", {"num_local_experts": 4}),
    ],
    ids=lambda case: case.name,
)
def test_planned_weights_are_those_that_a_rank_reads(case: Case, tmp_path: Path) -> None:
    """Turns red when the plan of a rank promises memory that its weights take."""
    write_checkpoint(case, tmp_path)
    platform = replace(make_platform(), device="cpu")
    plan = plan_startup(settings(2, model=str(tmp_path), num_kv_blocks=64), platform)
    index = tmp_path / "model.safetensors"
    shapes: dict[str, list[int]] = {}
    with safe_open(index, "pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no mapping
            shapes[name] = file.get_slice(name).get_shape()
    config = json.loads((tmp_path / "config.json").read_text())
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    size = plan.resolved.spec.dtype_bytes
    cut = sum(math.prod(s) for n, s in shapes.items() if len(s) > 1 and ".gate." not in n)
    whole = sum(math.prod(s) for n, s in shapes.items()) - cut
    got = plan.resolved.memory.fixed.weights
    if plan.resolved.spec.num_kv_heads == 1:  # every rank has k and v
        cut += sum(math.prod(s) for n, s in shapes.items() if "k_proj" in n or "v_proj" in n)
    assert got == pytest.approx(size * (whole + cut / 2), rel=0.05)
