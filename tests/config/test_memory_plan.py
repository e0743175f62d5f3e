"""The memory plan's parts, against what the engine allocates and what files say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.bundled import bundled_model_path
from quire.config import Checkpoint, TensorInfo, read_checkpoint, read_model_spec
from quire.config.kv_layout import KVFormat, KVLayout
from quire.config.memory.amounts import format_bytes
from quire.config.memory.plan import (
    EXPERT_ROWS,
    activation_bytes,
    capture_bytes,
    expert_bytes,
    largest_context,
    logits_bytes,
    table_bytes,
    weight_bytes,
)
from quire.config.model_spec import ExpertsSpec, Routing
from quire.config.resolve import resolve
from quire.config.settings import EngineSettings
from tests.config.specs import make_platform, make_spec

QWEN = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-0.6b"


def checkpoint_of(**shapes: tuple[int, ...]) -> Checkpoint:
    tensors = {
        name: TensorInfo(name, shape, "F32", Path("x.safetensors"), 0, 0)
        for name, shape in shapes.items()
    }
    return Checkpoint((Path("x.safetensors"),), tensors)


def test_weights_of_files_count_in_the_target_dtype_and_tied_ones_once() -> None:
    """A float32 file loaded as bfloat16 takes half; a head stored twice is one matrix in memory."""
    checkpoint = checkpoint_of(
        **{
            "model.embed_tokens.weight": (100, 8),
            "lm_head.weight": (100, 8),
            "model.layers.0.self_attn.rotary_emb.inv_freq": (32,),
            "h.0.attn.bias": (1, 1, 1024, 1024),
            "h.0.attn.c_attn.bias": (24,),
        }
    )
    spec = make_spec()
    assert weight_bytes(spec, checkpoint) == (100 * 8 + 24) * 2
    untied = replace(spec, tie_word_embeddings=False, dtype="float32")
    assert weight_bytes(untied, checkpoint) == (2 * 100 * 8 + 24) * 4


def test_tables_that_are_only_looked_up_are_widened() -> None:
    """Turns red when Gemma 4's table of a vector per layer counts in the bits of its file."""
    layout: Any = SimpleNamespace(bytes_on=lambda device: 7)
    names = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight", "h.0.mlp.weight")
    tensors = {
        name: TensorInfo(name, (100, 8), "Q4_0", Path("m.gguf"), 0, 0, packed=layout)
        for name in names
    }
    checkpoint = Checkpoint((Path("m.gguf"),), tensors)
    assert weight_bytes(make_spec(), checkpoint) == 7 + 1600 + 7
    untied = replace(make_spec(), tie_word_embeddings=False)
    assert weight_bytes(untied, checkpoint) == 1600 + 1600 + 7


def test_weights_without_files_are_the_parameters() -> None:
    assert weight_bytes(make_spec(num_parameters=1000, dtype="float32"), None) == 4000


def test_files_and_parameter_counts_of_the_bundled_model_agree() -> None:
    """Two ways to the same number; a wrong count would plan a wrong pool for dummy weights."""
    folder = bundled_model_path()
    spec = read_model_spec(folder)
    assert weight_bytes(spec, read_checkpoint(folder)) == weight_bytes(spec, None)


def test_benchmark_shape_has_the_weights_that_the_targets_name() -> None:
    """Figures are compared with engines that ran 474 M weights."""
    spec = read_model_spec(QWEN)
    assert round(spec.num_parameters / 1e6) == 474
    assert (spec.vocab_size, spec.num_layers, spec.dtype) == (32768, 28, "bfloat16")


def test_parts_grow_with_what_they_are_made_for() -> None:
    """A part that ignores its argument would be right for one setting only."""
    spec = make_spec()
    layout = KVLayout.of_windows(spec.windows, 16, KVFormat.plain(2, 64, "bfloat16"))
    assert activation_bytes(spec, 200) == 2 * activation_bytes(spec, 100)
    per_row = logits_bytes(spec, 11) - logits_bytes(spec, 10)
    assert per_row == spec.vocab_size * (2 + 4 + 4)
    assert table_bytes(spec, layout, 8, 512, 2) > table_bytes(spec, layout, 8, 256, 2)
    assert table_bytes(spec, layout, 9, 512, 2) > table_bytes(spec, layout, 8, 512, 2)


@pytest.mark.parametrize("num_tokens", [16, 2048])
def test_captured_steps_and_others_are_not_in_memory_at_once(num_tokens: int) -> None:
    """The larger of both counts: captured steps with their logits, or a large step of others."""
    spec = make_spec(vocab_size=50_000)
    settings = EngineSettings(max_num_seqs=16, max_num_batched_tokens=num_tokens)
    eager = activation_bytes(spec, num_tokens)
    captured = capture_bytes(spec, 16, num_tokens)
    assert (captured > eager) == (num_tokens == 16)
    cases = (
        ({}, max(captured, eager)),
        ({"enforce_eager": True}, eager),
        ({"torch_compile": True}, eager),  # which captures nothing on a CPU
    )
    for changes, expected in cases:
        chosen = replace(settings, **changes)
        fixed = resolve(chosen, spec, None, make_platform()).memory.fixed
        assert fixed.activations == expected


def test_threads_keep_rows_of_experts() -> None:
    """Turns red when more threads, or longer steps, are planned with the memory of one."""
    experts = ExpertsSpec(Routing(16, 4), (True,) * 4, inner_size=96, names="qwen")
    spec = replace(make_spec(hidden_size=64), experts=experts)
    row = (64 + 96) * 2
    picks = 8 * (16 + 2 + 2 * 100 * 4)
    assert expert_bytes(spec, 100, 1) == 100 * row + picks
    assert expert_bytes(spec, 100, 3) == 3 * 100 * row + picks
    assert expert_bytes(spec, 2048, 2) - expert_bytes(spec, 1024, 2) == 8 * 2 * 1024 * 4
    source = Path(__file__).parents[2] / "src" / "quire" / "ops" / "csrc" / "moe" / "tasks.h"
    assert f"kRowsPerTask = {EXPERT_ROWS};" in source.read_text(encoding="utf-8")
    settings = EngineSettings(max_num_seqs=4, max_num_batched_tokens=512)
    planned = [
        resolve(replace(settings, num_threads=threads), spec, None, make_platform())
        for threads in (1, 2)
    ]
    one, two = (each.memory.fixed.activations for each in planned)
    assert two - one == EXPERT_ROWS * row
    assert expert_bytes(make_spec(), 100, 8) == 0


@pytest.mark.parametrize("longest", [0, 1, 2, 63, 99, 100])
def test_largest_context(longest: int) -> None:
    """Off by one either way: a context that does not fit, or one wasted."""
    assert largest_context(lambda length: length <= longest, 100) == longest


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 2**30, "10.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
