"""Gemma 4 as it is published: other spellings than `transformers` writes, and tensors too many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import CASES, GEMMA4_EXPERTS, random_sequences, write_checkpoint
from tests.models.harness import PagedModel
from tests.models.test_text_parts import NAMES, nest

from quire import LLM
from quire.base.errors import ConfigError
from quire.config import read_model_spec
from quire.config.kv_layout import KVLayout
from quire.entrypoints.simulator.explorer import MemoryQuestion, explore

SEQUENCES = random_sequences((19, 6))


def published(name: str, folder: Path, **changes: Any) -> Path:
    """The checkpoint of a case, with the shape of full layers stated once."""
    case = next(case for case in CASES if case.name == name)
    write_checkpoint(case, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("per_layer_config")
    whole = {"global_head_dim": 32, "num_global_key_value_heads": None} | case.extra | changes
    path.write_text(json.dumps(config | whole))
    return folder


@pytest.mark.parametrize("name", ["gemma4", "gemma4-26b"])
def test_published_configs_mean_the_same(name: str, tmp_path: Path) -> None:
    """Turns red when full layers get the heads of sliding ones, or where `transformers` alone
    writes what it needs."""
    case = next(case for case in CASES if case.name == name)
    write_checkpoint(case, tmp_path / "written")
    wanted = PagedModel(tmp_path / "written", "reference").step(SEQUENCES)
    found = PagedModel(published(name, tmp_path / "published"), "reference").step(SEQUENCES)
    for seq in SEQUENCES:
        assert torch.equal(found[seq], wanted[seq])


def test_embeddings_without_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an embedding has no id"):
        LLM(str(published("gemma4", tmp_path)), skip_tokenizer_init=True, enable_prompt_embeds=True)


def test_tables_count_what_a_token_takes_in_the_cache(tmp_path: Path) -> None:
    """Turns red when all layers count with the widest heads, or those that share K and V count."""
    spec = read_model_spec(published("gemma4", tmp_path))
    layout = KVLayout.of_model(spec, 16, "bfloat16")
    planes = [
        group.kv.format.token_bytes * group.kv.format.num_planes * len(group.layers)
        for group in layout.groups
    ]
    assert explore(spec, MemoryQuestion()).kv_per_token == sum(planes) == 2 * spec.kv_elements
    assert sum(planes) < 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim


def test_tensors_that_no_layer_reads_are_left_out(tmp_path: Path) -> None:
    """Published files have K and V of layers that read those of others. Turns red when such a
    file is refused, or another one with a tensor too many is not."""
    folder = published("gemma4", tmp_path)
    wanted = PagedModel(folder, "reference").step(SEQUENCES)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer, other in ((4, 2), (5, 3)):
        for part in ("k_proj", "v_proj", "k_norm"):
            own, read = (f"model.layers.{n}.self_attn.{part}.weight" for n in (layer, other))
            assert own not in tensors
            tensors[own] = tensors[read].clone() + 1
    save_file(tensors, file, {"format": "pt"})
    found = PagedModel(folder, "reference").step(SEQUENCES)
    for seq in SEQUENCES:
        assert torch.equal(found[seq], wanted[seq])
    tensors["model.layers.1.self_attn.v_scale.weight"] = torch.ones(3)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"v_scale"):
        PagedModel(folder, "reference")


@pytest.mark.parametrize("name", ["gemma4", "gemma4-26b"])
def test_the_text_part_of_a_whole_model_is_served(name: str, tmp_path: Path) -> None:
    plain = published(name, tmp_path / "plain")
    whole = nest(plain, tmp_path / "whole", NAMES["as transformers 5 saves"])
    wanted = PagedModel(plain, "reference").step(SEQUENCES)
    found = PagedModel(whole, "reference").step(SEQUENCES)
    for seq in SEQUENCES:
        assert torch.equal(found[seq], wanted[seq])


def test_layers_are_found_by_keys_that_begin_with_zeros(tmp_path: Path) -> None:
    """`transformers` writes them so from 11 layers on. Turns red when full layers get the heads of
    sliding ones."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    written = json.loads(Gemma4TextConfig(num_hidden_layers=12).to_json_string())
    assert set(written["per_layer_config"]) == {"05", "11"}
    written["architectures"] = ["Gemma4ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    spec = read_model_spec(tmp_path)
    full = {layer for layer, shape in enumerate(spec.kv_shapes) if shape == (4, 512)}
    assert full == {5, 11}
    assert {shape for layer, shape in enumerate(spec.kv_shapes) if layer not in full} == {(4, 256)}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"enable_moe_block": True}, "key 'num_experts' is missing"),
        ({**GEMMA4_EXPERTS, "top_k_experts": 7}, "top_k_experts=7 must be at most num_experts=6"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers=5 of 6 leaves no layer of each kind"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "num_attention_heads=4"),
        ({"per_layer_config": {"1": {"intermediate_size": 3}}}, "intermediate_size of one layer"),
        ({"per_layer_config": {"6": {"head_dim": 8}}}, "'6' is no layer; state each layer from 0"),
        ({"per_layer_config": {"-1": {"head_dim": 8}}}, "'-1' is no layer"),
        ({"per_layer_config": {"": {"head_dim": 8}}}, "'' is no layer"),
        ({"per_layer_config": {"1": {}, "01": {"head_dim": 8}}}, "'01' is there twice"),
    ],
)
def test_what_cannot_be_served_is_named(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = published("gemma4", tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_spec(folder)
