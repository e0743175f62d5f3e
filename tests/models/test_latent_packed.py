"""Models with latent attention whose checkpoints are in FP8, as DeepSeek publishes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import Case, random_sequences, write_checkpoint
from tests.models.harness import PagedModel
from tests.models.test_golden import assert_equal
from tests.packed_writer import float8

PLAIN = (
    "norm.weight", "gate.weight", "embed_tokens.weight", "lm_head.weight", "_bias",
    "eh_proj.weight",
)  # fmt: skip
"""Ends of the names of tensors that DeepSeek keeps wider."""


def write_pair(source: Path, block: tuple[int, int]) -> tuple[Path, Path]:
    """A folder in FP8, and one with the same numbers, below `source` and with its names."""
    packed, plain = source / "packed", source / "plain"
    for folder in (packed, plain):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("packed", "plain"))
    writer = float8("blocks", "weight_scale_inv", block)
    numbers, random = load_file(plain / "model.safetensors"), np.random.default_rng(3)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in numbers.items():
        if name.endswith(PLAIN):
            stored[name] = tensor
            continue
        written, values = writer(*tensor.shape, random)
        numbers[name] = values
        stored |= {f"{name.removesuffix('weight')}{kind}": part for kind, part in written.items()}
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    for folder, tensors in ((packed, stored), (plain, numbers)):
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    return packed, plain


@pytest.mark.parametrize("implementation", ["reference", "best"])
@pytest.mark.parametrize("block", [(128, 128), (16, 8)], ids=str)
@pytest.mark.parametrize("rank", [20, None], ids=str)
def test_fp8_gives_the_logits_of_its_numbers(
    rank: int | None, block: tuple[int, int], implementation: str, tmp_path: Path
) -> None:
    """Would catch a scale that stays behind when rows are put in another order, and a matrix to
    keys and values that is split before it is widened."""
    case = Case("deepseek-v3", "deepseek_v3", {"q_lora_rank": rank})
    write_checkpoint(case, tmp_path)
    packed, plain = write_pair(tmp_path, block)
    sequences = random_sequences(case.lengths)
    wanted = PagedModel(plain, "reference", case.max_positions).step(sequences)
    assert_equal(PagedModel(packed, implementation, case.max_positions).step(sequences), wanted)
