"""GGUF headers. A plan reads all that it needs from them alone, and nothing in them is trusted."""

from __future__ import annotations

import contextlib
import math
import re
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import ConfigError
from quire.config import read_checkpoint, read_model_spec, resolve_model_folder
from quire.config.families import FAMILIES
from quire.config.families.gemma4 import Gemma4Traits
from quire.config.gguf import config_of, read_gguf_header, read_gguf_parts
from quire.config.rope import (
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from tests.gguf_writer import Tensor, float_tensor, write_gguf
from tests.profiles import machine_settings

SETTINGS = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 500000.0,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
    "tokenizer.ggml.tokens": ["a", "b"],
    "tokenizer.ggml.scores": [0.0, -1.0],
}
TABLE = Tensor("Q4_0", (8, 32), bytes(8 * 18))
TENSORS = {"token_embd.weight": TABLE, "output_norm.weight": float_tensor(torch.ones(32))}


def test_spec_and_sizes_come_from_the_header(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", SETTINGS, TENSORS)
    spec = read_model_spec(file)
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (8, 32, 1)
    assert (spec.dtype, spec.norm_eps, spec.tie_word_embeddings) == ("bfloat16", 1e-6, True)
    assert spec.eos_token_ids == (2, 7)
    assert spec.ropes[0] is not None
    assert spec.ropes[0].theta == 500000.0
    tensors = read_checkpoint(file).tensors
    assert set(tensors) == {"model.embed_tokens.weight", "model.norm.weight"}
    assert tensors["model.embed_tokens.weight"].num_bytes == 8 * 18
    assert resolve_model_folder(str(file)) == file


def _settings_of(architecture: str) -> dict[str, Any]:
    """SETTINGS under another architecture's name."""
    found = {key.replace("llama.", f"{architecture}.", 1): SETTINGS[key] for key in SETTINGS}
    return found | {"general.architecture": architecture}


@pytest.mark.parametrize(
    "name", sorted({each.gguf.name for each in FAMILIES if each.gguf} - {"gemma4"})
)
def test_heads_that_no_key_tells(name: str, tmp_path: Path) -> None:
    """Converters write sizes of heads only where config.json has one. Turns red when another size
    is taken then, such as that of a family's largest model."""
    settings = _settings_of(name)
    del settings[f"{name}.attention.head_count_kv"]
    raw = config_of(read_gguf_parts(write_gguf(tmp_path / "m.gguf", settings, TENSORS)))
    assert (raw.read(int, "head_dim"), raw.read(int, "num_key_value_heads")) == (8, 4)


@pytest.mark.parametrize(
    ("name", "key", "number", "model_type"),
    [
        ("olmo2", "attention.sliding_window", 9, "olmo3"),
        ("olmo2", "attention.sliding_window", 0, "olmo2"),
        ("llama", "expert_count", 4, "mixtral"),
        ("llama", "expert_count", 0, "llama"),
    ],
)
def test_a_number_tells_families_of_one_name(
    name: str, key: str, number: int, model_type: str, tmp_path: Path
) -> None:
    """Turns red when a converted folder states the type of another family."""
    settings = _settings_of(name) | {f"{name}.{key}": number}
    raw = config_of(read_gguf_parts(write_gguf(tmp_path / "m.gguf", settings, TENSORS)))
    family = next(each for each in FAMILIES if each.model_type == model_type)
    assert raw.read(str, "model_type") == model_type
    assert raw.read_list(str, "architectures") == (family.architecture,)


@pytest.mark.parametrize(("window", "found"), [(0, None), (9, 9)])
@pytest.mark.parametrize("rotated", [6, 8])
def test_phi3_as_it_is_converted(
    window: int, found: int | None, rotated: int, tmp_path: Path
) -> None:
    """A window of 0 is none, and heads turn in part (Phi-4-mini), whose size nothing states."""
    changes = {"phi3.attention.sliding_window": window, "phi3.rope.dimension_count": rotated}
    file = write_gguf(tmp_path / "m.gguf", _settings_of("phi3") | changes, TENSORS)
    spec = read_model_spec(file)
    assert (spec.windows, spec.head_dim) == ((found,), 8)
    assert spec.ropes[0] is not None and spec.ropes[0].rotary_dim == rotated


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<eos>", "a", "<end_of_turn>"], (0, 2)),
        (["<eos>", "a", "<turn|>", "<|tool_response>"], (0, 2, 3)),
        (["<|endoftext|>", "<|end|>", "<|assistant|>"], (0, 1)),
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], (0, 1, 2)),
        (["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"], (0, 2, 3)),
        (["</s>", "end", "<|im_start|>", "<|im_end|>"], (0, 3)),
    ],
)
def test_ends_of_turns_are_known_by_their_text(
    tokens: list[str], ends: tuple[int, ...], tmp_path: Path
) -> None:
    """Published files often state the end of a text alone. Turns red when their chats go on after
    an answer, or when gpt-oss ends after its thoughts."""
    settings = SETTINGS | {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.tokens": tokens}
    del settings["tokenizer.ggml.eot_token_id"]
    spec = read_model_spec(write_gguf(tmp_path / "m.gguf", settings, TENSORS))
    assert spec.eos_token_ids == ends


def test_rope_divisors_of_llama_3(tmp_path: Path) -> None:
    """Catches a context that degrades because the tensor of divisors is passed over."""
    divisors = [1.0, 2.0, 4.0, 8.0]
    tensors = TENSORS | {"rope_freqs.weight": float_tensor(torch.tensor(divisors))}
    spec = read_model_spec(write_gguf(tmp_path / "m.gguf", SETTINGS, tensors))
    assert spec.ropes[0] is not None
    scaling = spec.ropes[0].scaling
    assert isinstance(scaling, LongRopeScaling)
    assert (scaling.long_factor, scaling.attention_factor) == (tuple(divisors), 1.0)
    assert "rope_freqs.weight" not in read_checkpoint(tmp_path / "m.gguf").tensors


GEMMA4 = {
    "general.architecture": "gemma4",
    "gemma4.block_count": 3,
    "gemma4.context_length": 64,
    "gemma4.embedding_length": 32,
    "gemma4.feed_forward_length": [32, 32, 64],
    "gemma4.attention.head_count": 4,
    "gemma4.attention.head_count_kv": [2, 1, 1],
    "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma4.attention.sliding_window": 8,
    "gemma4.attention.sliding_window_pattern": [True, False, False],
    "gemma4.attention.shared_kv_layers": 1,
    "gemma4.attention.key_length": 16,
    "gemma4.attention.key_length_swa": 8,
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"feed_forward_length": [32, 64, 64]}, "feed_forward_length differs"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv has 2 entries for 3 layers"),
        ({"attention.sliding_window_pattern": [False, False, True]}, "the last layer slides"),
        ({"attention.value_length_swa": 4}, "key_length_swa=8 and value_length_swa=4"),
        (
            {"attention.sliding_window_pattern": None},
            "lack gemma4.attention.sliding_w",
        ),
        ({"rope.dimension_count_swa": 4}, "rope.dimension_count_swa=4 rotates a part"),
        ({"divisors": [1.0, 2.0] * 4}, "rope_freqs.weight does not say"),
    ],
)
def test_layers_of_gemma_4(changes: dict[str, Any], problem: str | None, tmp_path: Path) -> None:
    divisors = torch.tensor(changes.get("divisors", [1.0] * 2 + [1e30] * 6))
    tensors = {
        **TENSORS,
        "rope_freqs.weight": float_tensor(divisors),
        "blk.0.attn_v.weight": TABLE,
        "blk.0.ffn_gate_up_exps.weight": Tensor("Q4_0", (2, 6, 32), bytes(12 * 18)),
    }
    settings = GEMMA4 | {
        f"gemma4.{key}": value for key, value in changes.items() if key != "divisors"
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    file = write_gguf(tmp_path / "m.gguf", settings, tensors)
    if problem is not None:
        with pytest.raises(ConfigError, match=problem):
            read_model_spec(file)
        return
    spec = read_model_spec(file)
    assert spec.kv_shapes == ((2, 8), (1, 16), (1, 16))
    assert isinstance(spec.traits, Gemma4Traits)
    assert spec.traits.keys_are_values == (False, True, True)
    assert spec.traits.inner_sizes == (32, 32, 64)
    assert spec.ropes[1] == RopeSpec(16, 1e6, ProportionalScaling(0.25))
    found = read_checkpoint(file).tensors
    experts = [found[f"model.layers.0.experts.1.{part}_proj.weight"] for part in ("gate", "up")]
    assert [each.shape for each in experts] == [(3, 32), (3, 32)]
    assert experts[0].end == experts[1].start


HALF_TURNS = {"rope_freqs.weight": float_tensor(torch.tensor([1.0, 2.0, 4.0, 8.0]))}
SETS = {
    "rope_factors_short.weight": float_tensor(torch.ones(4)),
    "rope_factors_long.weight": float_tensor(torch.tensor([1.0, 2.0, 4.0, 8.0])),
}


def _same(divisor: float, attention: float) -> LongRopeScaling:
    """The same divisor for each pair of a head of 8."""
    return LongRopeScaling((divisor,) * 4, (divisor,) * 4, 64, attention)


def _yarn_of(factor: float, original: int, attention: float = 1.0) -> YarnScaling:
    temperature = (0.1 * math.log(factor) + 1.0) * attention
    return YarnScaling(factor, original, temperature, 32.0, 1.0, truncate=True)


@pytest.mark.parametrize(
    ("settings", "tensors", "scaling"),
    [
        ({"scale_linear": 4.0}, {}, LinearScaling(4.0)),
        ({"scaling.factor": 4.0}, {}, LinearScaling(4.0)),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, {}, LinearScaling(2.0)),
        ({"scaling.factor": 0.0, "scaling.type": "linear"}, {}, None),
        ({"scaling.factor": 4.0, "scaling.type": "none"}, {}, None),
        ({"scaling.attn_factor": 1.0, "scaling.finetuned": True}, {}, None),
        ({"scaling.attn_factor": 1.5, "scale_linear": 4.0}, {}, _same(4.0, 1.5)),
        ({"scaling.attn_factor": 1.5, "scaling.type": "none"}, {}, _same(1.0, 1.5)),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, {}, _yarn_of(4.0, 64)),
        ({"scaling.type": "yarn", "scaling.original_context_length": 16}, {}, _yarn_of(1.0, 16)),
        (
            {"scaling.type": "yarn", "scale_linear": 4.0, "scaling.attn_factor": 1.5},
            {},
            _yarn_of(4.0, 64, 1.5),
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_ext_factor": 0.0},
            {},
            LinearScaling(4.0),
        ),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.yarn_beta_fast": 16.0,
                "scaling.yarn_beta_slow": 2.0,
            },
            {},
            replace(_yarn_of(4.0, 64), beta_fast=16.0, beta_slow=2.0),
        ),
        (
            {"scaling.factor": 2.0, "scaling.attn_factor": 1.5},
            HALF_TURNS,
            LongRopeScaling((2.0, 4.0, 8.0, 16.0), (2.0, 4.0, 8.0, 16.0), 64, 1.5),
        ),
        (
            {"scaling.attn_factor": 1.5, "scaling.original_context_length": 16},
            SETS,
            LongRopeScaling((1.0,) * 4, (1.0, 2.0, 4.0, 8.0), 16, 1.5),
        ),
        ({"dimension_sections": [0, 0, 0, 0], "freq_base_swa": 500000.0}, {}, None),
    ],
)
def test_settings_of_ropes_are_obeyed(
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    scaling: RopeScaling | None,
    tmp_path: Path,
) -> None:
    """Each means what it means to llama.cpp, also where another one is not stated. Turns red when
    one is passed over, and other tokens come out."""
    metadata = SETTINGS | {f"llama.rope.{key}": value for key, value in settings.items()}
    spec = read_model_spec(write_gguf(tmp_path / "m.gguf", metadata, TENSORS | tensors))
    assert spec.ropes == (RopeSpec(8, 500000.0, scaling),)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "scaling.factor", 0.5),
        ("llama", "scaling.type", "ntk"),
        ("llama", "scaling.yarn_ext_factor", 1.0),
        ("llama", "scaling.yarn_ext_factor", "x"),
        ("llama", "scaling.yarn_attn_factor", 1.25),
        ("llama", "scaling.yarn_log_multiplier", 0.5),
        ("qwen3", "scaling.alpha", 1000.0),
        ("llama", "dimension_count_swa", 4),
        ("glm4", "dimension_sections", [2, 1, 1, 0]),
        ("olmo2", "freq_base_swa", 10000.0),
        ("qwen2", "freq_base_per_layer", [1e4]),
        ("granite", "scaling.finetuned", False),
        ("gemma3", "scaling.attn_factor", 1.5),
        ("gemma4", "scaling.factor", 8.0),
        ("gemma4", "scaling.attn_factor", 1.5),
        ("qwen3", "of_next_year", 1),
    ],
)
def test_settings_of_ropes_that_nothing_obeys_are_refused(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    """Also those that are not known yet."""
    settings = GEMMA4 if name == "gemma4" else _settings_of(name)
    tensors = {**TENSORS, "blk.0.attn_v.weight": TABLE}
    file = write_gguf(tmp_path / "m.gguf", settings | {f"{name}.rope.{key}": value}, tensors)
    with pytest.raises(ConfigError, match=re.escape(f"m.gguf: {name}.rope.{key}=")):
        read_model_spec(file)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"rope_factors_long.weight": SETS["rope_factors_long.weight"]}, "has one of rope_factors"),
        (HALF_TURNS, "rope.scaling.type='yarn' beside divisors"),
    ],
)
def test_divisors_that_do_not_fit(tensors: dict[str, Tensor], problem: str, tmp_path: Path) -> None:
    settings = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "m.gguf", SETTINGS | settings, TENSORS | tensors)
    with pytest.raises(ConfigError, match=problem):
        read_model_spec(file)


@pytest.mark.parametrize(
    ("stated", "sampling", "unread"),
    [
        (
            {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25},
            {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25},
            "",
        ),
        (
            {"penalty_repeat": 1.5, "penalty_last_n": -1, "mirostat": 0, "mirostat_tau": 5.0},
            {"repetition_penalty": 1.5},
            "",
        ),
        ({"penalty_repeat": 1.5, "penalty_last_n": 0}, {}, ""),
        ({"penalty_repeat": 1.5}, {}, "general.sampling.penalty_repeat=1.5"),
        (
            {"penalty_repeat": 1.5, "penalty_last_n": 64, "xtc_probability": 0.5, "mirostat": 2},
            {"xtc_probability": 0.5},
            "general.sampling.mirostat=2, general.sampling.penalty_repeat=1.5",
        ),
        ({"temp": -1.0, "top_k": 0}, {"temperature": 0.0, "top_k": 0}, ""),
        ({"sequence": "kpt", "top_k": 5}, {"top_k": 5}, "general.sampling.sequence='kpt'"),
    ],
)
def test_recommended_sampling_of_a_file(
    stated: dict[str, Any],
    sampling: dict[str, Any],
    unread: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fault: a setting that llama.cpp would draw by is passed over without a word."""
    settings = SETTINGS | {f"general.sampling.{key}": value for key, value in stated.items()}
    file = write_gguf(tmp_path / "m.gguf", settings, TENSORS)
    assert read_model_spec(file).generation.sampling() == sampling
    wanted = [f"{file}: not obeyed: {unread}; requests can say how tokens are drawn"]
    assert [each.message for each in caplog.records] == (wanted if unread else [])
    assert read_model_spec(file, with_sampling=False).generation.sampling() == {}


def test_recommended_sampling_without_a_meaning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: a suggestion that could not be one refused the file."""
    stated = {"temp": float("nan"), "top_p": 2.0, "top_k": "few", "min_p": 0.25}
    stated |= {"penalty_last_n": -1, "penalty_repeat": -2.0}
    settings = SETTINGS | {f"general.sampling.{key}": each for key, each in stated.items()}
    file = write_gguf(tmp_path / "m.gguf", settings, TENSORS)
    assert read_model_spec(file).generation.sampling() == {"min_p": 0.25}
    for key, record in zip(
        ("temp=nan", "top_p=2.0", "top_k='few'", "penalty_repeat=-2.0"), caplog.records, strict=True
    ):
        assert record.message.startswith(f"not obeyed: {file}: general.sampling.{key} ")
    caplog.clear()
    settings["general.sampling.penalty_last_n"] = "all"
    again = read_model_spec(write_gguf(file, settings, TENSORS))
    assert again.generation.sampling() == {"min_p": 0.25}
    assert "general.sampling.penalty_repeat=-2.0" in caplog.records[-1].message


def _patch(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


def _table(field: bytes) -> Callable[[bytes], bytes]:
    """Replace what follows the embedding's name: dims, type, offset."""
    name = b"token_embd.weight"
    plain = struct.pack("<I2QIQ", 2, 32, 8, 2, 0)
    return _patch(name + plain, name + field)


HUGE = 1 << 63
HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is empty"),
    "other": (lambda data: b"PK\3\4" + data[4:], "is no GGUF file"),
    "cut in the header": (lambda data: data[:100], "broken GGUF file"),
    "cut in the data": (lambda data: data[:-64], "the file ends at"),
    "version 1": (lambda data: data[:4] + b"\1\0\0\0" + data[8:], "version 1 is not supported"),
    "big endian": (lambda data: data[:4] + b"\0\0\0\3" + data[8:], "big-endian"),
    "tensors": (lambda data: data[:8] + struct.pack("<Q", HUGE) + data[16:], "tensors do not fit"),
    "pairs": (lambda data: data[:16] + struct.pack("<Q", HUGE) + data[24:], "do not fit"),
    "key length": (lambda data: data[:24] + struct.pack("<Q", HUGE) + data[32:], "name of 92"),
    "value type": (_patch(b"alignment\4", b"alignment\x63"), "unknown type 99"),
    "alignment": (_patch(b"alignment\4\0\0\0\x20", b"alignment\4\0\0\0\x21"), "power of two"),
    "text": (_patch(b"\5\0\0\0\0\0\0\0llama", b"\xff" * 8 + b"llama"), "needs 1844"),
    "utf-8": (_patch(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0ll\xffma"), "not UTF-8"),
    "array": (
        _patch(b"\x08\0\0\0\2\0\0\0\0\0\0\0", b"\x08\0\0\0" + struct.pack("<Q", HUGE)),
        "texts do not fit",
    ),
    "array of arrays": (_patch(b"tokens\x09\0\0\0\x08", b"tokens\x09\0\0\0\x09"), "unknown type 9"),
    "no dims": (_table(struct.pack("<I2QIQ", 0, 32, 8, 2, 0)), "has 0 dimensions"),
    "many dims": (_table(struct.pack("<I2QIQ", 1 << 31, 32, 8, 2, 0)), "dimensions"),
    "huge dims": (_table(struct.pack("<I2QIQ", 2, 32, HUGE, 2, 0)), "the file ends at"),
    "product": (_table(struct.pack("<I2QIQ", 2, 1 << 32, 1 << 32, 2, 0)), "the file ends at"),
    "zero": (_table(struct.pack("<I2QIQ", 2, 32, 0, 2, 0)), "no whole number"),
    "blocks": (_table(struct.pack("<I2QIQ", 2, 16, 8, 2, 0)), "no whole number of Q4_0 blocks"),
    "offset": (_table(struct.pack("<I2QIQ", 2, 32, 8, 2, HUGE)), "the file ends at"),
    "unaligned": (_table(struct.pack("<I2QIQ", 2, 32, 8, 2, 1)), "no multiple of 32"),
    "overlap": (_table(struct.pack("<I2QIQ", 2, 32, 8, 2, 128)), "overlap"),
    "unknown type": (_table(struct.pack("<I2QIQ", 2, 32, 8, 99, 0)), "unknown type 99"),
    "IQ2_XXS": (_table(struct.pack("<I2QIQ", 2, 32, 8, 16, 0)), "IQ2_XXS.*Q4_K_M"),
    "key twice": (_patch(b"eot_token_id", b"eos_token_id"), "given twice"),
    "architecture": (_patch(b"\0llama", b"\0mamba"), "'mamba' is not supported"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_sentence(name: str, tmp_path: Path) -> None:
    """Catches a crash or an allocation that a number in a file asks for."""
    change, message = HOSTILE[name]
    file = write_gguf(tmp_path / "m.gguf", SETTINGS, TENSORS)
    file.write_bytes(change(file.read_bytes()))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=message) as caught:
            read_model_spec(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_tensor_given_twice(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", SETTINGS, {"a1": TABLE, "a2": TABLE})
    file.write_bytes(file.read_bytes().replace(b"a2", b"a1"))
    with pytest.raises(ConfigError, match="'a1' is given twice"):
        read_gguf_header(file)


def test_wrong_kinds_of_values(tmp_path: Path) -> None:
    for change in (
        {"llama.block_count": "many"},
        {"llama.context_length": 0},
        {"tokenizer.ggml.eos_token_id": "</s>"},
        {"general.architecture": 3},
        {"llama.attention.head_count": [4, 2]},
        {"llama.rope.freq_base": -1.0},
        {"llama.attention.head_count": "4", "llama.rope.dimension_count": 8},
        {"llama.rope.dimension_count": 4},
        {"llama.rope.dimension_count": "8"},
    ):
        file = write_gguf(tmp_path / "m.gguf", SETTINGS | change, TENSORS)
        with pytest.raises(ConfigError, match=r"m\.gguf: "):
            read_model_spec(file)


COUNTS = [key for key, value in SETTINGS.items() if key.startswith("llama.") and value != 1e-6]


@pytest.mark.parametrize("key", [*COUNTS, "llama.attention.key_length"])
def test_huge_numbers_of_settings_cost_no_memory(key: str, tmp_path: Path) -> None:
    """Catches something made once per layer of a model that states billions of them."""
    for power in (14, 24, 31):
        changed = SETTINGS | {key: 1 << power}
        file = write_gguf(tmp_path / "m.gguf", changed, TENSORS)
        tracemalloc.start()
        try:
            with contextlib.suppress(ConfigError):
                read_model_spec(file)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_more_blocks_than_tensors(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", SETTINGS | {"llama.block_count": 3}, TENSORS)
    with pytest.raises(ConfigError, match="states 3 blocks and has 2 tensors"):
        read_model_spec(file)


def test_divisors_of_a_wrong_shape(tmp_path: Path) -> None:
    """Catches a tensor of settings that is read whole, whatever its size."""
    file = tmp_path / "m.gguf"
    for shape in ((1 << 17,), (2, 4)):
        tensor = float_tensor(torch.ones(shape))
        write_gguf(file, SETTINGS, TENSORS | {"rope_freqs.weight": tensor})
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight of type F32 and shape"):
            read_model_spec(file)


def test_parts_that_are_missing(tmp_path: Path) -> None:
    part = write_gguf(tmp_path / "m-00001-of-00002.gguf", SETTINGS, TENSORS)
    with pytest.raises(ConfigError, match=r"part m-00002-of-00002\.gguf of the model is missing"):
        read_checkpoint(part)
    part.rename(tmp_path / "whole.gguf")
    write_gguf(tmp_path / "whole.gguf", SETTINGS | {"split.count": 2}, TENSORS)
    with pytest.raises(ConfigError, match="is one of 2 parts"):
        read_checkpoint(tmp_path / "whole.gguf")


def test_a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", SETTINGS, TENSORS)
    with pytest.raises(ConfigError, match=f"give a GGUF file, such as {file}"):
        resolve_model_folder(str(tmp_path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("fuzz") / "m.gguf", SETTINGS, TENSORS)


FUZZ_CASES = 500
"""10,000 under `make soak`."""


@machine_settings(FUZZ_CASES)
@given(flips=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), max_size=4))
def test_changed_bytes_are_read_or_refused(whole: Path, flips: list[tuple[int, int]]) -> None:
    """Catches any other end than a spec or one sentence."""
    data = bytearray(whole.read_bytes())
    for place, byte in flips:
        data[place % len(data)] = byte
    file = whole.with_name("changed.gguf")
    file.write_bytes(data)
    try:
        read_model_spec(file)
        read_checkpoint(file)
    except ConfigError as error:
        assert len(str(error)) < 2000


@machine_settings(FUZZ_CASES)
@given(data=st.binary(max_size=200), counts=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_random_headers_are_refused(whole: Path, data: bytes, counts: tuple[int, int]) -> None:
    file = whole.with_name("random.gguf")
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + data)
    with pytest.raises(ConfigError):
        read_model_spec(file)
