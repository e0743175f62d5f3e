"""config.json of families with recurrent states becomes the right `ModelSpec`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import read_model_spec
from quire.config.families.qwen3_next import DeltaTraits
from quire.config.model_spec import DeltaHeads, RopeSpec
from quire.errors import ConfigError

LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
    "eos_token_id": 7,
    "dtype": "bfloat16",
}
"""LiquidAI/LFM2-1.2B."""


def test_lfm2_has_states_where_it_does_not_attend(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LFM2))
    spec = read_model_spec(tmp_path)
    assert spec.kv_layers == (2, 5, 8, 10, 12, 14)
    assert spec.own_kv_shapes == ((8, 64),) * 6
    assert spec.states == tuple(0 if i in spec.kv_layers else 2 * 2048 for i in range(16))
    assert spec.state_bytes == 10 * 2 * 2048 * 2
    assert spec.intermediate_size == 8192
    assert spec.tie_word_embeddings
    assert spec.num_parameters == 1_170_340_608


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({"block_ffn_dim_multiplier": None, "block_ff_dim": 6657}, 4438),
        ({"block_ffn_dim_multiplier": 1.1}, 9216),
        ({"block_ff_dim": None, "intermediate_size": 6656}, 4608),
    ],
)
def test_lfm2_adjusts_the_size_of_its_mlp(
    tmp_path: Path, changes: dict[str, Any], size: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LFM2, **changes}))
    assert read_model_spec(tmp_path).intermediate_size == size


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": ["conv"] * 16}, "has no 'full_attention'"),
        ({"layer_types": ["conv", "full_attention"]}, "2 entries for 16 layers"),
        ({"layer_types": ["mamba"] * 16}, "layer_types"),
        ({"conv_L_cache": 9}, "quire takes 2 to 8"),
        ({"conv_L_cache": 1}, "quire takes 2 to 8"),
    ],
)
def test_lfm2_of_another_shape_is_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LFM2, **changes}))
    with pytest.raises(ConfigError, match=expected):
        read_model_spec(tmp_path)


QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "dtype": "bfloat16",
}
"""Qwen/Qwen3.5-0.8B, without what it need not state."""


def test_qwen3_5_has_rules_where_it_does_not_attend(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5))
    spec = read_model_spec(tmp_path)
    assert spec.kv_layers == (3, 7, 11, 15, 19, 23)
    assert spec.own_kv_shapes == ((2, 256),) * 6
    assert spec.on_one_axis().ropes[3] == RopeSpec(64, 1e7)
    rope = spec.ropes[3]
    assert rope is not None
    assert [rope.axes.count(axis) for axis in range(3)] == [11, 11, 10], "they take turns"
    assert spec.traits == DeltaTraits(DeltaHeads(16, 16, 128, 128), 4)
    assert spec.state_bytes == 18 * (3 * 6144 * 2 + 16 * 128 * 128 * 4)
    assert spec.num_parameters == 752_393_024


def test_qwen3_next_interleaves_heads_and_has_experts(tmp_path: Path) -> None:
    stated = {"num_hidden_layers": 48, "vocab_size": 151936, "dtype": "bfloat16"}
    names = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    (tmp_path / "config.json").write_text(json.dumps({**names, **stated}))
    spec = read_model_spec(tmp_path)
    assert spec.traits == DeltaTraits(DeltaHeads(16, 32, 128, 128, "by_key"), 4)
    assert spec.experts is not None
    assert (spec.experts.routing.num_experts, spec.experts.routing.top_k) == (512, 10)
    assert (spec.experts.routing.renormalise, spec.experts.shared_gated) == (True, True)
    assert spec.num_parameters == 79_674_391_296
    assert len(spec.kv_layers) == 12


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": ["linear_attention"] * 24}, "has no 'full_attention'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "2 entries for 24 layers"),
        ({"layer_types": ["mamba"] * 24}, "layer_types"),
        ({"linear_conv_kernel_dim": 9}, "quire takes 2 to 8"),
        ({"linear_num_value_heads": 24}, "24 is not a multiple of linear_num_key_heads=16"),
        ({"linear_key_head_dim": 512}, "multiples of 4 up to 256, and multiples of 16"),
        ({"linear_value_head_dim": 24}, "multiples of 4 up to 256, and multiples of 16"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_qwen3_5_of_another_shape_is_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_5, **changes}))
    with pytest.raises(ConfigError, match=expected):
        read_model_spec(tmp_path)
