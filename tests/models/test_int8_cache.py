"""An int8 cache is as close to the model with large biases on K and V as without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import Case, random_sequences, write_checkpoint
from tests.models.harness import PagedModel, set_biases
from tests.pairs import BY_PAIRS

Change = Callable[[torch.Tensor], torch.Tensor]

LARGE = 100.0
BIASED = slice(13, None, 32)
"""One dim of every head."""

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
GEMMA = {"head_dim": 32, "attention_bias": True, "query_pre_attn_scalar": 24}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
CASES = (
    Case("qwen2", "qwen2", WIDE),
    Case(
        "qwen2-window",
        "qwen2",
        {**WIDE, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    Case("llama-bias", "llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    Case(
        "llama-yarn",
        "llama",
        {
            **WIDE,
            "attention_bias": True,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 32},
        },
    ),
    Case("gemma2-capped", "gemma2", {**WIDE, **GEMMA, "attn_logit_softcapping": 20.0}),
    Case("opt", "opt", {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 2}),
    Case("gpt2", "gpt2", {"n_embd": 64, "n_head": 2}),
)


def one_dim(bias: torch.Tensor) -> torch.Tensor:
    changed = torch.zeros_like(bias)
    changed[BIASED] = LARGE
    return changed


def hide_biased_dims(folder: Path) -> None:
    """Keep a constant in the outputs of attention from the residual stream, where it would hide
    all else."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("attn.o_proj.weight", "attn.out_proj.weight")):
            tensor[:, BIASED] = 0
        elif name.endswith("attn.c_proj.weight"):  # GPT-2
            tensor[BIASED] = 0
    save_file(tensors, file, {"format": "pt"})


def divergence(folder: Path, implementation: str) -> float:
    """KL of the next token's distribution over an int8 cache from that over a float32 one."""
    sequences = random_sequences((60, 33))
    exact, rounded = (
        torch.cat(
            [
                logits.log_softmax(1)
                for logits in PagedModel(folder, implementation, 64, kv_dtype=kv_dtype)
                .step(sequences)
                .values()
            ]
        )
        for kv_dtype in (None, "int8")
    )
    return float((exact.exp() * (exact - rounded)).sum(1).mean())


@BY_PAIRS
@pytest.mark.parametrize("implementation", ["reference", "best"])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_large_biases_cost_nothing(
    case: Case, part: str, implementation: str, tmp_path: Path
) -> None:
    """Turns red when a constant takes the steps of what differs from token to token."""
    write_checkpoint(case, tmp_path)
    hide_biased_dims(tmp_path)
    for each in "kv":
        set_biases(tmp_path, each, torch.zeros_like)
    without = divergence(tmp_path, implementation)
    set_biases(tmp_path, part, one_dim)
    # A bias on K makes some softmaxes sharper, where an error counts more, and others flatter.
    assert divergence(tmp_path, implementation) < 4 * without


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_biases_of_any_size_and_in_every_dim(size: float, tmp_path: Path) -> None:
    """Turns red when many biases of one size hide each other."""
    write_checkpoint(CASES[0], tmp_path)
    for each in "kv":
        set_biases(tmp_path, each, torch.zeros_like)
    without = divergence(tmp_path, "best")
    generator = torch.Generator().manual_seed(2)
    for each in "kv":
        set_biases(tmp_path, each, lambda b: size * torch.randn(b.shape, generator=generator))
    assert divergence(tmp_path, "best") < 4 * without
