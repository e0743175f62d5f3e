"""Rope tables equal those of `transformers` for the settings of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.compute.layers import RotaryEmbedding
from quire.compute.layers.rotary import rope_tables
from quire.config import read_model_spec
from quire.config.rope import DynamicNTKScaling, LinearScaling, RopeSpec
from quire.ops.kv.rope_and_write_kv.rope import rope

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 256,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LONG = [1.0 + 0.5 * i for i in range(64)]
PUBLISHED: dict[str, tuple[int, dict[str, Any], int]] = {
    "llama-2": (4096, {}, 4096),
    "llama-3": (8192, {"rope_theta": 500000.0}, 8192),
    "llama-3.1": (
        131072,
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        20000,
    ),
    "qwen-2.5-yarn": (
        32768,
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            },
        },
        40000,
    ),
    "vicuna-16k": (4096, {"rope_scaling": {"factor": 4.0, "type": "linear"}}, 16384),
    "phi-3-128k": (
        131072,
        {
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": LONG, "long_factor": LONG[::-1]},
        },
        8192,
    ),
    "dynamic": (2048, {"rope_scaling": {"factor": 2.0, "type": "dynamic"}}, 2048),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_of_published_models(tmp_path: Path, name: str) -> None:
    """Catches a formula that is only right at toy sizes, and float32 rounding at far positions."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    max_positions, settings, length = PUBLISHED[name]
    config = {**BASE, "max_position_embeddings": max_positions, **settings, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rope = read_model_spec(tmp_path).ropes[0]
    assert rope is not None
    cos, sin = rope_tables(rope, length)

    theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
    positions = torch.arange(length)[None]
    their_cos, their_sin = theirs(torch.zeros(1), positions)
    half = rope.rotary_dim // 2
    # Angles are float32 up to `length`, so they carry an error of about length / 2^24.
    torch.testing.assert_close(cos, their_cos[0, :, :half], rtol=0, atol=length * 2**-23)
    torch.testing.assert_close(sin, their_sin[0, :, :half], rtol=0, atol=length * 2**-23)


def test_dynamic_rows_do_not_depend_on_the_table(tmp_path: Path) -> None:
    """Catches K in the cache going stale: a position's rotation must not move as others come."""
    rope = RopeSpec(16, 10000.0, DynamicNTKScaling(4.0, 32))
    short, long = rope_tables(rope, 40), rope_tables(rope, 100)
    assert torch.equal(short[0], long[0][:40])
    plain = rope_tables(RopeSpec(16, 10000.0), 32)
    assert torch.equal(plain[1], long[1][:32])


def test_partial_rotary() -> None:
    """Catches rotating elements of a head that the model leaves alone, or wrong frequencies."""
    rotary = RotaryEmbedding(RopeSpec(4, 100.0, LinearScaling(2.0)), 9, torch.device("cpu"))
    q, k = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    expected = q.clone()
    for pair, frequency in ((0, 1.0), (1, 0.1)):
        angle = torch.tensor(7 * frequency / 2.0)
        a, b = q[..., pair].clone(), q[..., pair + 2].clone()
        expected[..., pair] = a * angle.cos() - b * angle.sin()
        expected[..., pair + 2] = b * angle.cos() + a * angle.sin()
    rope(q, k, torch.tensor([7]), rotary.cos, rotary.sin)
    torch.testing.assert_close(q, expected)
