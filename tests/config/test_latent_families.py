"""config.json of families with latent attention becomes the right `ModelSpec`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.config import read_model_spec
from quire.config.kv_layout import KVLayout
from quire.config.model_spec import LatentSpec, LlamaTraits, ModelSpec
from quire.config.rope import RopeSpec, YarnScaling

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "max_position_embeddings": 163840,
    "num_key_value_heads": 128,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""DeepSeek-V3, as far as it is not what `transformers` means where the file is silent."""

KIMI_K2 = {
    **V3,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "rope_scaling": {**YARN, "factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0},
}
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 163840,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
FLASH = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
MINICPM3 = {"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3"}


def spec_of(folder: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return read_model_spec(folder)


def test_deepseek_v3(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, V3)
    assert spec.latent == LatentSpec(512, 64, 128, 128, 1536)
    assert (spec.num_kv_heads, spec.head_dim, spec.max_context) == (1, 576, 163840)
    assert spec.num_parameters == 671_026_419_200
    assert round(spec.num_active_parameters / 1e9) == 38  # 37 without the embedding
    assert spec.experts is not None
    routing = spec.experts.routing
    assert (routing.num_groups, routing.top_groups, routing.group_best) == (8, 4, 2)
    assert (routing.score, routing.scale, routing.biased) == ("sigmoid", 2.5, True)
    assert spec.experts.layers == (False,) * 3 + (True,) * 58
    assert spec.experts.shared_size == 2048


def test_the_temperature_counts_once(tmp_path: Path) -> None:
    """Would catch 0.1 · ln(factor) + 1 on cos and sin beside that on scores, and a scale of heads
    as wide as the cache."""
    for config, size in ((V3, 1.0), (V2_LITE, 0.707)):
        spec = spec_of(tmp_path, config)
        assert isinstance(spec.traits, LlamaTraits)
        temperature = 0.1 * size * math.log(40) + 1
        assert spec.traits.attention_scale == pytest.approx(192**-0.5 * temperature**2)
        (rope,) = set(spec.ropes)
        assert rope is not None and isinstance(rope.scaling, YarnScaling)
        assert (rope.rotary_dim, rope.scaling.attention_factor) == (64, 1.0)
    halved = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}
    (rope,) = set(spec_of(tmp_path, V3, rope_scaling=halved).ropes)
    assert rope is not None and isinstance(rope.scaling, YarnScaling)
    whole, half = (0.1 * size * math.log(40) + 1 for size in (1.0, 0.5))
    assert rope.scaling.attention_factor == pytest.approx(whole / half)


def test_kimi_k2_is_a_v3(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, KIMI_K2)
    assert spec.experts is not None
    assert (spec.num_heads, spec.experts.routing.num_experts) == (64, 384)
    assert spec.experts.routing.num_groups == 1
    assert round(spec.num_parameters / 1e9) == 1026


def test_deepseek_v2_lite(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, V2_LITE)
    assert spec.latent == LatentSpec(512, 64, 128, 128, None)
    assert spec.num_parameters == 15_706_484_224
    assert spec.experts is not None
    assert (spec.experts.routing.score, spec.experts.routing.renormalise) == ("softmax", False)
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    spec = spec_of(tmp_path, V2_LITE, **grouped)
    assert spec.experts is not None
    assert (spec.experts.routing.num_groups, spec.experts.routing.group_best) == (8, 1)


def test_glm_flash_and_minicpm3(tmp_path: Path) -> None:
    flash = spec_of(tmp_path, FLASH)
    assert flash.latent == LatentSpec(512, 64, 192, 256, 768)
    assert isinstance(flash.traits, LlamaTraits)
    assert flash.traits.attention_scale == 256**-0.5
    assert flash.traits.pairs_neighbours
    spec = spec_of(tmp_path, MINICPM3)
    assert spec.latent == LatentSpec(256, 32, 64, 64, 768)
    assert (spec.ropes[0], spec.tie_word_embeddings) == (RopeSpec(32, 1e4), True)
    assert isinstance(spec.traits, LlamaTraits)
    assert not spec.traits.pairs_neighbours
    assert spec.traits.embedding_factor == 12
    assert spec.traits.residual_factor == pytest.approx(1.4 / math.sqrt(62))
    assert spec.traits.logit_factor == pytest.approx(0.1)


@pytest.mark.parametrize(("config", "bytes_"), [(V3, 1152), (FLASH, 1152), (MINICPM3, 576)])
def test_a_token_takes_one_vector_in_each_layer(
    tmp_path: Path, config: dict[str, Any], bytes_: int
) -> None:
    spec = spec_of(tmp_path, config)
    layout = KVLayout.of_model(spec, 16, "bfloat16")
    assert layout.page_bytes == 16 * bytes_ * spec.num_layers
    (group,) = layout.groups
    assert (group.kv.kind, group.kv.format.num_planes) == ("latent", 1)
    assert spec.kv_elements * 2 == bytes_ * spec.num_layers


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("DeepseekV32ForCausalLM", "deepseek_v32"), ("GlmMoeDsaForCausalLM", "glm_moe_dsa")],
)
def test_an_index_limits_the_context(tmp_path: Path, architecture: str, kind: str) -> None:
    config = {"architectures": [architecture], "model_type": kind}
    spec = spec_of(tmp_path, config)
    assert (spec.index_top_k, spec.max_context) == (2048, 2048)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"attention_bias": True, "q_lora_rank": None}, "attention_bias=True without q_lora_rank"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"q_lora_rank": 0}, "q_lora_rank=0 must be at least 1"),
        ({"n_group": 7}, "n_group=7"),
        ({"mlp_layer_types": ["dense"]}, "for each of num_hidden_layers=61 layers"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(tmp_path, V3, **changes)
