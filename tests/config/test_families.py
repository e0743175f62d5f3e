"""config.json of every family, in old and new spellings, becomes the right `ModelSpec`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.config import ModelSpec, read_model_spec
from quire.config.families.cohere import CohereTraits
from quire.config.families.gemma import Gemma2Traits
from quire.config.families.gpt import GPTNeoXTraits, OPTTraits
from quire.config.families.mpt import MPTTraits
from quire.config.model_spec import LlamaTraits
from quire.config.rope import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)
from quire.config.settings import EngineSettings
from quire.config.startup import find_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    """The spec of LLAMA with `changes`; a value of ... removes its key."""
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_spec(folder)


MPT: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"],
    "model_type": "mpt",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 100,
    "max_seq_len": 2048,
    "torch_dtype": "bfloat16",
}


def test_mpt_is_read_with_its_slopes(tmp_path: Path) -> None:
    """Catches a model without a table of positions whose context is taken for a hard limit."""
    config = {**MPT, "attn_config": {"alibi": True, "alibi_bias_max": 16, "clip_qkv": None}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(tmp_path)
    assert spec.traits == MPTTraits(0.25, 16.0)
    assert spec.score_options == {"alibi_slopes"}
    assert not spec.has_learned_positions
    assert spec.parameters.layer == 12 * 64 * 64 + 2 * 64


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"no_bias": False}, "no_bias=False is not supported"),
        ({"attn_config": {"alibi": False}}, "alibi=False is not supported"),
        ({"norm_type": "rmsnorm"}, "norm_type='rmsnorm' is not supported"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale='inv_sqrt_d_model' is not supported"),
        ({"logit_scale": 0.5}, "logit_scale=0.5 is not supported"),
        (
            {"attn_config": {"attn_type": "multiquery_attention"}},
            "attn_type='multiquery_attention' is not supported",
        ),
        ({"attn_config": {"clip_qkv": 6}}, "clip_qkv=6.0 is not supported"),
        ({"n_heads": 5}, "d_model=64 is no multiple of n_heads=5"),
    ],
)
def test_mpt_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    """Catches a variant of MPT that is served as if it were the common one."""
    (tmp_path / "config.json").write_text(json.dumps({**MPT, **changes}))
    with pytest.raises(ConfigError, match=expected):
        read_model_spec(tmp_path)


def test_gemma2_alternates_and_caps(tmp_path: Path) -> None:
    """The config is in the form of google/gemma-2-2b, without `layer_types` and
    `tie_word_embeddings`. Catches a cap or a factor that is read from the wrong key, and layers
    that slide in the wrong order."""
    spec = spec_of(
        tmp_path,
        architectures=["Gemma2ForCausalLM"],
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=500,
        head_dim=16,
    )
    assert spec.traits == Gemma2Traits(False, 1 / 16, 50.0, 30.0)
    assert spec.windows == (500, None, 500, None)
    assert (spec.tie_word_embeddings, spec.activation) == (True, "gelu_pytorch_tanh")
    assert spec.score_options == {"soft_cap"}
    assert spec.parameters.layer == 64 * 16 * (8 + 2 + 2 + 8) + 3 * 64 * 128 + 4 * 64


def test_sizes_and_tokens(tmp_path: Path) -> None:
    """Catches a size read from the wrong key."""
    spec = spec_of(tmp_path)
    assert (spec.hidden_size, spec.intermediate_size, spec.num_layers) == (64, 128, 4)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 2, 8)
    assert (spec.vocab_size, spec.max_context, spec.norm_eps) == (100, 1000, 1e-5)
    assert (spec.dtype, spec.dtype_bytes, spec.tie_word_embeddings) == ("bfloat16", 2, False)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.pad_token_id) == (1, (2,), None)
    assert spec.traits == LlamaTraits()
    assert spec.windows == (None,) * 4
    assert not spec.has_learned_positions
    assert hash(spec) == hash(spec_of(tmp_path))


def test_missing_values_take_the_family_defaults(tmp_path: Path) -> None:
    """Catches null treated as a value: Hugging Face writes it for what is not set."""
    spec = spec_of(
        tmp_path, num_key_value_heads=None, head_dim=None, eos_token_id=..., dtype="float32"
    )
    assert (spec.num_kv_heads, spec.head_dim, spec.eos_token_ids) == (8, 8, ())


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_spellings(tmp_path: Path, key: str) -> None:
    """Catches a reader that knows only one of the two names of the dtype."""
    assert spec_of(tmp_path, **{"dtype": ..., key: "float16"}).dtype == "float16"
    assert spec_of(tmp_path, **{"dtype": ..., key: "torch.float32"}).dtype == "float32"


def test_a_config_without_dtype_needs_no_weights(tmp_path: Path) -> None:
    """Catches `load_format="dummy"` refused, with the advice to use it, for want of weights that
    tell the dtype; and weights that are not whole taken for none."""
    assert spec_of(tmp_path, dtype=...).dtype == "bfloat16"
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="weight_map"):
        spec_of(tmp_path, dtype=...)


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    """Catches Llama 3 that never stops: its chat stop token is only in generation_config.json."""
    generation = {"eos_token_id": [7, 8, 9], "temperature": 0.6, "top_k": 20, "top_p": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    spec = spec_of(tmp_path, eos_token_id=[7, 5])
    assert spec.eos_token_ids == (7, 5, 8, 9)
    assert spec.generation.sampling() == {"temperature": 0.6, "top_p": 1.0, "top_k": 20}


ROPES = [
    ({"rope_theta": 5000.0}, RopeSpec(8, 5000.0), 1000),
    ({"rope_theta": 5000, "rope_scaling": None}, RopeSpec(8, 5000.0), 1000),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeSpec(8, 5e5), 1000),
    (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        RopeSpec(8, 10000.0, LinearScaling(4.0)),
        4000,
    ),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
        RopeSpec(8, 10000.0, DynamicNTKScaling(2.0, 1000)),
        2000,
    ),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "type": "ignored",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 100,
            }
        },
        RopeSpec(8, 10000.0, Llama3Scaling(8.0, 1.0, 4.0, 100)),
        1000,
    ),
    (
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1000,
                "attention_factor": 1.5,
            }
        },
        RopeSpec(8, 10000.0, YarnScaling(4.0, 1000, 1.5, 32.0, 1.0, True)),
        4000,
    ),
    (  # 1 / (0.1 ln 4 + 1), as DeepSeek-R1-0528-Qwen3-8B has it: nothing is scaled
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1000,
                "attn_factor": 0.8782488562869419,
            }
        },
        RopeSpec(8, 10000.0, YarnScaling(4.0, 1000, pytest.approx(1.0), 32.0, 1.0, True)),
        4000,
    ),
    (
        {
            "rope_scaling": {
                "type": "su",
                "short_factor": [1, 1, 1, 1],
                "long_factor": [2, 2, 2, 2],
                "attention_factor": 1.25,
            },
            "original_max_position_embeddings": 100,
        },
        RopeSpec(8, 10000.0, LongRopeScaling((1.0,) * 4, (2.0,) * 4, 100, 1.25)),
        1000,
    ),
    ({"partial_rotary_factor": 0.5}, RopeSpec(4, 10000.0), 1000),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        RopeSpec(2, 10000.0),
        1000,
    ),
]


@pytest.mark.parametrize(("changes", "rope", "max_context"), ROPES)
def test_rope_spellings(
    tmp_path: Path, changes: dict[str, Any], rope: RopeSpec, max_context: int
) -> None:
    """Catches a rope setting that is silently dropped because it is spelled the other way."""
    spec = spec_of(tmp_path, **changes)
    assert spec.ropes == (rope,) * 4
    assert spec.max_context == max_context


def test_rope_by_layer_type(tmp_path: Path) -> None:
    """Catches nested rope_parameters read as flat ones: every layer would get the default."""
    spec = spec_of(
        tmp_path,
        architectures=["Qwen3ForCausalLM"],
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    full, sliding = RopeSpec(8, 1e6, LinearScaling(2.0)), RopeSpec(8, 1e4)
    assert spec.ropes == (sliding, full, sliding, full)


def test_keys_that_no_tensor_shows_are_those_of_transformers(tmp_path: Path) -> None:
    """Catches a silent file that is read as if these were off."""
    silent = {"max_position_embeddings": ..., "head_dim": 8}
    gemma = {**silent, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    spec = spec_of(tmp_path, **gemma)
    assert (spec.max_context, spec.windows) == (8192, (4096, None, 4096, None))
    assert isinstance(spec.traits, Gemma2Traits)
    assert (spec.traits.score_cap, spec.traits.logit_cap) == (50.0, 30.0)
    spec = spec_of(tmp_path, **gemma, attn_logit_softcapping=None)
    assert isinstance(spec.traits, Gemma2Traits) and spec.traits.score_cap is None
    mistral = {**silent, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert spec_of(tmp_path, **mistral).windows == (4096,) * 4


def test_windows(tmp_path: Path) -> None:
    """Catches windows on the wrong layers."""
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert spec_of(tmp_path, **mistral, sliding_window=16).windows == (16,) * 4
    assert spec_of(tmp_path, **mistral, sliding_window=None).windows == (None,) * 4
    assert spec_of(tmp_path, **mistral, sliding_window=1000).windows == (None,) * 4
    longer = read_model_spec(tmp_path, longest=1001)
    assert longer.windows == (1000,) * 4, "max_model_len exceeds what the model claims"
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 3}
    assert spec_of(tmp_path, **qwen).windows == (None,) * 4
    mixed = spec_of(tmp_path, **qwen, use_sliding_window=True)
    assert mixed.windows == (None, None, None, 16)
    assert mixed.traits == LlamaTraits(qkv_bias=True)


def test_opt(tmp_path: Path) -> None:
    """Catches OPT-350m's exceptions being lost, and positions taken for rotary ones."""
    spec = spec_of(
        tmp_path,
        architectures=["OPTForCausalLM"],
        ffn_dim=96,
        do_layer_norm_before=False,
        word_embed_proj_dim=32,
    )
    assert spec.traits == OPTTraits(
        norm_before=False, final_norm=False, norm_affine=True, bias=True, embed_size=32
    )
    assert spec.has_learned_positions
    assert spec.tie_word_embeddings


LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REFUSED = [
    ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM.*LlamaForCausalLM"),
    ({"architectures": ..., "model_type": ...}, "architecture not stated"),
    ({"hidden_size": ...}, "'hidden_size' is missing"),
    ({"hidden_size": "64"}, "hidden_size='64' must be of type int"),
    ({"hidden_size": True}, "hidden_size=True must be of type int"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
    ({"num_hidden_layers": 1 << 31}, "num_hidden_layers=2147483648 must be at most 10000"),
    ({"num_key_value_heads": 3}, "num_attention_heads=8.*num_key_value_heads=3"),
    ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size=64.*=7"),
    ({"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu' is not supported.*'silu'"),
    ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn' is not supported.*'bfloat16'"),
    ({"rope_scaling": {"type": "ntk"}}, "rope_scaling: type='ntk' is not supported.*'yarn'"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling: key 'factor' is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5 must be at least 1"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor holds 1 numbers"),
    ({"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4"),
    ({"partial_rotary_factor": 1e308}, r"partial_rotary_factor=1e\+308"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan must be of type float, and finite"),
    ({"rope_theta": math.inf}, "rope_theta=inf must be of type float, and finite"),
    ({"max_position_embeddings": 10**400}, "of type int, of at most 63 bits"),
    ({"max_position_embeddings": 1e300}, "of type int, of at most 63 bits"),
    ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "factor=nan must be"),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 1e308}},
        r"factor=1e\+308 must be at least 1, and",
    ),
    (
        {"rope_scaling": LONG_ROPE | {"original_max_position_embeddings": 1}},
        "original_max_position_embeddings=1 must be above 1",
    ),
    ({"rope_scaling": LONG_ROPE | {"long_factor": [1.0, 0, 1, 1]}}, "long_factor holds 0.0"),
    ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method='aqlm' is not supported"),
    ({"quantization_config": {"quant_method": "awq", "bits": 3}}, "bits=3 is not supported"),
    (
        {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]},
        "layer_types has 1 entries for 4 layers",
    ),
    (
        {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 4},
        "layer_types='linear_attention' is not supported",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refusals_name_key_and_value(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Catches an unsupported checkpoint that starts anyway, or dies without saying why."""
    with pytest.raises(ConfigError, match=message):
        spec_of(tmp_path, **changes)


def test_folder_without_config(tmp_path: Path) -> None:
    """Catches a bare FileNotFoundError."""
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("text", ['{"hidden_size": 6', "[]", "", "[" * 100_000])
def test_broken_config(tmp_path: Path, text: str) -> None:
    """Catches a JSON error that does not name the file."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("architectures", [None, [], ...])
@pytest.mark.parametrize(
    ("kind", "architecture"), [("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_an_architecture_by_the_type_of_the_model(
    kind: str,
    architecture: str,
    architectures: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fault: a file that a trainer saved without `architectures` does not load."""
    spec = spec_of(tmp_path, architectures=architectures, model_type=kind)
    assert spec.architecture == architecture
    assert f"{architecture} is taken, for model_type='{kind}'" in caplog.text
    with pytest.raises(ConfigError, match="architecture not stated is not supported"):
        spec_of(tmp_path, architectures=architectures, model_type="unheard_of")


@pytest.mark.parametrize("stated", ["float8_e4m3fn", "int4", "auto", "float64"])
def test_a_dtype_that_the_user_overrides_need_not_be_known(stated: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="or give the setting dtype"):
        spec_of(tmp_path, dtype=stated)
    settings = EngineSettings(model=str(tmp_path), dtype="float32")
    assert find_model(settings).spec.num_layers


def test_phi3_calls_every_scaling_longrope(tmp_path: Path) -> None:
    """The config is in the form of microsoft/Phi-3-mini-128k-instruct, with the trained length
    beside the section. Catches YaRN in its place, and the sets of factors of another length."""
    scaling = {"type": "yarn", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    spec = spec_of(
        tmp_path,
        architectures=["Phi3ForCausalLM"],
        rms_norm_eps=...,
        rope_scaling=scaling,
        max_position_embeddings=4000,
        original_max_position_embeddings=500,
        sliding_window=100,
    )
    assert spec.traits == LlamaTraits(fused_qkv=True, fused_gate=True)
    assert (spec.norm_eps, spec.windows) == (1e-5, (100,) * 4)
    (rope,) = set(spec.ropes)
    assert rope is not None
    assert isinstance(rope.scaling, LongRopeScaling)
    assert (rope.scaling.original_max_positions, rope.scaling.long_factor) == (500, (2.0,) * 4)


def test_olmo3_scales_full_layers_alone(tmp_path: Path) -> None:
    """The config is in the form of allenai/Olmo-3-7B. Catches a scaling on sliding layers, and
    another theta."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1000}
    spec = spec_of(
        tmp_path,
        architectures=["Olmo3ForCausalLM"],
        rope_scaling=scaling,
        max_position_embeddings=8000,
        sliding_window=100,
    )
    assert spec.windows == (100, 100, 100, None)
    sliding, full = spec.ropes[0], spec.ropes[3]
    assert sliding == RopeSpec(8, 5e5)
    assert full is not None
    assert isinstance(full.scaling, YarnScaling)
    assert full.theta == 5e5
    assert spec.traits == LlamaTraits(qk_norm="row", norms="after")


def test_granite_states_its_factors(tmp_path: Path) -> None:
    """Catches a factor under another's key, and logits that are multiplied."""
    spec = spec_of(
        tmp_path,
        architectures=["GraniteForCausalLM"],
        embedding_multiplier=12,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        logits_scaling=8,
    )
    assert spec.traits == LlamaTraits(
        attention_scale=0.015625, embedding_factor=12.0, residual_factor=0.22, logit_factor=0.125
    )
    with pytest.raises(ConfigError, match="logits_scaling is 0"):
        spec_of(tmp_path, architectures=["GraniteForCausalLM"], logits_scaling=0)


def test_arcee_has_a_plain_mlp(tmp_path: Path) -> None:
    """Catches a gate that is counted in memory, and the activation of Llama."""
    names = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee"}
    spec = spec_of(tmp_path, **names, mlp_bias=True, max_position_embeddings=...)
    assert spec.traits == LlamaTraits(mlp_bias=True, gated=False)
    assert (spec.activation, spec.max_context) == ("relu2", 4096)
    assert spec.parameters.layer == 64 * (2 * 64 + 2 * 16) + 2 * 64 * 128 + (128 + 64) + 2 * 64
    assert (spec.matrices[2].outputs, spec.matrices[2].inputs) == (128, 64)


def test_seed_oss_has_biases_of_three_kinds(tmp_path: Path) -> None:
    """Catches a bias of the output that follows that of q, k and v, and sizes of heads and a
    context that the file leaves out."""
    names = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
    silent = {"head_dim": ..., "num_key_value_heads": ..., "max_position_embeddings": ...}
    spec = spec_of(tmp_path, **names, **silent, num_attention_heads=16)
    assert spec.traits == LlamaTraits(qkv_bias=True)
    assert (spec.head_dim, spec.num_kv_heads, spec.max_context) == (128, 8, 524288)
    given = {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}
    assert spec_of(tmp_path, **names, **given).traits == LlamaTraits(o_bias=True, mlp_bias=True)


def test_helium_has_no_bias_behind_attention(tmp_path: Path) -> None:
    """Catches a bias of the output that follows that of q, k and v, rope and norms of Llama, and
    ids of tokens that the file leaves out."""
    names = {"architectures": ["HeliumForCausalLM"], "model_type": "helium"}
    silent = {"head_dim": ..., "max_position_embeddings": ..., "rms_norm_eps": ...}
    spec = spec_of(tmp_path, **names, **silent, rope_theta=..., eos_token_id=..., bos_token_id=...)
    assert spec.traits == LlamaTraits(pairs_neighbours=True)
    assert (spec.head_dim, spec.max_context, spec.norm_eps) == (128, 4096, 1e-8)
    assert spec.ropes[0] == RopeSpec(128, 1e5)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    given = {"attention_bias": True, "mlp_bias": True}
    traits = LlamaTraits(qkv_bias=True, mlp_bias=True, pairs_neighbours=True)
    assert spec_of(tmp_path, **names, **given).traits == traits


def test_smollm3_has_layers_without_positions(tmp_path: Path) -> None:
    """Catches a context that is taken for a hard limit, since some layer has no rope, and windows
    that count although they are switched off."""
    spec = spec_of(tmp_path, architectures=["SmolLM3ForCausalLM"], sliding_window=9)
    assert [rope is None for rope in spec.ropes] == [False, False, False, True]
    assert not spec.has_learned_positions
    assert spec.tie_word_embeddings
    assert spec.windows == (None,) * 4
    given = {"no_rope_layers": [0, 1, 1, 1], "use_sliding_window": True, "sliding_window": 9}
    spec = spec_of(tmp_path, architectures=["SmolLM3ForCausalLM"], **given)
    assert [rope is None for rope in spec.ropes] == [True, False, False, False]
    assert spec.windows == (9, None, None, None)
    with pytest.raises(ConfigError, match="no_rope_layers has 1 entries for 4 layers"):
        spec_of(tmp_path, architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1])


def test_glm4_takes_its_defaults(tmp_path: Path) -> None:
    """Catches heads that are rotated whole where the file is silent."""
    silent = dict.fromkeys(("rms_norm_eps", "num_key_value_heads", "eos_token_id"), ...)
    spec = spec_of(tmp_path, architectures=["Glm4ForCausalLM"], **silent)
    assert (spec.head_dim, spec.num_kv_heads, spec.norm_eps) == (128, 2, 1.5625e-07)
    assert spec.ropes[0] == RopeSpec(64, 10000.0)
    assert spec.eos_token_ids == (151329, 151336, 151338)
    assert spec.traits == LlamaTraits(
        qkv_bias=True, fused_gate=True, pairs_neighbours=True, norms="both"
    )


def test_exaone4_turns_sliding_layers_alone(tmp_path: Path) -> None:
    """The config is in the form of LGAI-EXAONE/EXAONE-4.0-32B and -1.2B. Catches a model without
    windows that sees no positions."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    given = {"sliding_window": 100, "sliding_window_pattern": "LLLG", "layer_types": kinds}
    spec = spec_of(tmp_path, architectures=["Exaone4ForCausalLM"], **given)
    assert spec.windows == (100, 100, 100, None)
    assert [rope is None for rope in spec.ropes] == [False, False, False, True]
    full = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    spec = spec_of(tmp_path, architectures=["Exaone4ForCausalLM"], **full)
    assert spec.windows == (None,) * 4
    assert None not in spec.ropes
    assert spec.traits == LlamaTraits(qk_norm="head", norms="after")


def test_gpt_neox_reads_old_names_of_rope(tmp_path: Path) -> None:
    """The config is in the form of EleutherAI/pythia-160m. Catches heads that are rotated whole,
    and sizes of a gated MLP."""
    spec = spec_of(
        tmp_path,
        architectures=["GPTNeoXForCausalLM"],
        num_key_value_heads=...,
        rms_norm_eps=...,
        rotary_pct=0.5,
        rotary_emb_base=5000,
        use_parallel_residual=False,
    )
    assert spec.traits == GPTNeoXTraits(attention_bias=True, is_parallel=False)
    assert spec.ropes[0] == RopeSpec(4, 5000.0)
    assert (spec.activation, spec.norm_eps, spec.num_kv_heads) == ("gelu", 1e-5, 8)
    assert [m.outputs for m in spec.matrices] == [192, 64, 128, 64, 100]


def test_cohere2_slides_and_sees_no_positions_in_turn(tmp_path: Path) -> None:
    """Catches theta of Cohere in its successor, and an R+ whose norms on heads are passed over."""
    given = {"layer_norm_eps": 1e-5, "sliding_window": 100}
    spec = spec_of(tmp_path, architectures=["Cohere2ForCausalLM"], **given)
    assert spec.windows == (100, 100, 100, None)
    assert spec.ropes == (RopeSpec(8, 1e4),) * 3 + (None,)
    assert (spec.tie_word_embeddings, spec.traits) == (True, CohereTraits(False, 0.0625))
    assert spec_of(tmp_path, architectures=["CohereForCausalLM"]).ropes[0] == RopeSpec(8, 5e5)
    with pytest.raises(ConfigError, match="use_qk_norm=True is not supported"):
        spec_of(tmp_path, architectures=["CohereForCausalLM"], use_qk_norm=True)
