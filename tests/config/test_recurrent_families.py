"""config.json of families with recurrent states becomes the right `ModelSpec`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.config import read_model_spec
from quire.config.families.mamba import SSDTraits
from quire.config.families.qwen3_next import DeltaTraits
from quire.config.kv_layout import KVLayout
from quire.config.model_spec import DeltaHeads, SSDHeads
from quire.config.rope import RopeSpec
from quire.config.shard import Shard

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


GRANITE_4: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 0,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "position_embedding_type": "nope",
    "vocab_size": 100352,
    "tie_word_embeddings": True,
    "attention_multiplier": 0.015625,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
"""ibm-granite/granite-4.0-h-micro, without what it need not state."""

MAMBA_2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_heads": 24,
    "n_groups": 1,
    "vocab_size": 50288,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, float("inf")],
    "dtype": "float32",
}
"""state-spaces/mamba2-130m, converted."""


def test_granite_4_attends_without_positions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GRANITE_4))
    spec = read_model_spec(tmp_path)
    assert spec.kv_layers == (5, 15, 25, 35)
    assert spec.ropes == (None,) * 40
    assert not spec.has_learned_positions, "longer contexts are allowed"
    assert spec.state_bytes == 36 * (3 * (4096 + 256) * 2 + 64 * 64 * 128 * 4)
    assert isinstance(spec.traits, SSDTraits)
    assert spec.traits.heads == SSDHeads(64, 64, 1, 128, (0.0, 3e38))
    assert spec.num_parameters == 3_191_396_096
    matrices = sum(each.outputs * each.inputs * each.count for each in spec.matrices)
    assert 0.999 < matrices / spec.num_parameters < 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_b_and_c_of_the_only_group(tmp_path: Path, ranks: int) -> None:
    """Would catch a plan that shares them, and so counts too few parts of a state on a disk."""
    (tmp_path / "config.json").write_text(json.dumps(GRANITE_4))
    layout = KVLayout.of_model(read_model_spec(tmp_path), 16, "bfloat16").of_rank(Shard(0, ranks))
    channels, heads = 4096 // ranks + 256, 64 // ranks
    assert layout.state_bytes == 36 * (3 * channels * 2 + heads * 64 * 128 * 4)
    assert layout.state_input_bytes == 36 * (2 * channels + heads) * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_several_groups(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GRANITE_4, "mamba_n_groups": 2}))
    layout = KVLayout.of_model(read_model_spec(tmp_path), 16, "bfloat16").of_rank(Shard(0, ranks))
    channels, heads = (4096 + 2 * 256) // ranks, 64 // ranks
    assert layout.state_bytes == 36 * (3 * channels * 2 + heads * 64 * 128 * 4)
    assert layout.state_input_bytes == 36 * (2 * channels + heads) * 2


def test_granite_4_with_rope_alone_has_no_states(tmp_path: Path) -> None:
    """The case of granite-4.0-micro, a dense model of this architecture."""
    changes = {"layer_types": ["attention"] * 40, "position_embedding_type": "rope"}
    (tmp_path / "config.json").write_text(json.dumps({**GRANITE_4, **changes}))
    spec = read_model_spec(tmp_path)
    assert (spec.states, spec.wide_states, spec.state_bytes) == ((), (), 0)
    assert spec.ropes == (RopeSpec(64, 1e4),) * 40


def test_granite_4_has_experts_beside_a_shared_network(tmp_path: Path) -> None:
    changes = {"num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**GRANITE_4, **changes}))
    experts = read_model_spec(tmp_path).experts
    assert experts is not None
    assert (experts.inner_size, experts.shared_size, experts.shared_fused) == (512, 8192, True)
    assert (experts.routing.num_experts, experts.routing.top_k) == (64, 6)


def test_mamba_2_has_no_kv(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MAMBA_2))
    spec = read_model_spec(tmp_path)
    assert (spec.has_kv, spec.kv_elements, spec.kv_layers) == (False, 0, ())
    assert spec.state_bytes == 24 * (3 * (1536 + 256) * 4 + 24 * 64 * 128 * 4)
    assert spec.num_parameters == 128_989_632
    layout = KVLayout.of_model(spec, 16, "float32")
    assert [group.layers for group in layout.groups] == [()]
    assert (layout.page_bytes, layout.hit_tokens, layout.blocks_for(33)) == (0, 16, 3)


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (GRANITE_4, {"layer_types": ["mamba"]}, "1 entries for 40 layers"),
        (GRANITE_4, {"layer_types": ["conv"] * 40}, "layer_types"),
        (GRANITE_4, {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        (GRANITE_4, {"mamba_d_head": 32}, "mamba_n_heads=64 of mamba_d_head=32 are not"),
        (GRANITE_4, {"mamba_n_groups": 3}, "is not a multiple of mamba_n_groups=3"),
        (GRANITE_4, {"mamba_d_conv": 9}, "quire takes 2 to 8"),
        (MAMBA_2, {"state_size": 512}, "multiples of 4 up to 256"),
        (MAMBA_2, {"num_heads": 192, "head_dim": 8}, "multiples of 16"),
        (MAMBA_2, {"time_step_limit": [0.5, 0.1]}, "the least first"),
        (MAMBA_2, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_selective_states_of_another_shape_are_refused(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**base, **changes}))
    with pytest.raises(ConfigError, match=expected):
        read_model_spec(tmp_path)
