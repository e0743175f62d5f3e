"""Model specs and machines for tests, without a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.base.platform import CpuFacts, GpuFacts, Platform
from quire.config import ModelSpec, ParameterCounts, RopeSpec
from quire.config.model_spec import LlamaTraits

GIB = 2**30


def make_spec(
    *,
    num_layers: int = 4,
    hidden_size: int = 256,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    vocab_size: int = 1000,
    max_context: int = 4096,
    dtype: str = "bfloat16",
    windows: Sequence[int | None] | None = None,
    num_parameters: int = 5_000_000,
    learned_positions: bool = False,
) -> ModelSpec:
    """A Llama of any size; `num_parameters` all count as embedding."""
    rope = None if learned_positions else RopeSpec(head_dim, 10000.0)
    return ModelSpec(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation="silu",
        norm_eps=1e-5,
        max_context=max_context,
        tie_word_embeddings=True,
        dtype=dtype,
        windows=tuple(windows) if windows else (None,) * num_layers,
        ropes=(rope,) * num_layers,
        traits=LlamaTraits(),
        parameters=ParameterCounts(num_parameters, 0, 0),
    )


def make_platform(
    free_bytes: int = 8 * GIB, num_cores: int = 2, features: Sequence[str] = ("avx2",)
) -> Platform:
    """A CPU machine with so much memory free."""
    cpu = CpuFacts("x86_64", "test processor", frozenset(features), num_cores, ())
    return Platform("cpu", "linux", cpu, 2 * free_bytes, free_bytes)


def make_gpu_platform(
    total_bytes: int = 80 * GIB, free_bytes: int | None = None, problem: str | None = None
) -> Platform:
    """A machine with a GPU; `free_bytes` of it are free, nearly all if None."""
    free = total_bytes - GIB // 2 if free_bytes is None else free_bytes
    gpu = GpuFacts("nvidia", "Test GPU", "SM 90", (9, 0), total_bytes, free, "570.86", (12, 8))
    return replace(make_platform(), gpu=gpu, gpu_problem=problem)
