"""Experts of quantized folders: kept with their bits, and multiplied by one kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import CASES, Case, random_sequences, write_checkpoint
from tests.models.harness import PagedModel, new_ops
from tests.packed_writer import FORMATS, Writer, mxfp4

from quire.compute.quantization import QuantizedFormats
from quire.config import read_checkpoint

SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
GPTQ = next(each for each in FORMATS if each.name == "gptq-4")


def case_of(name: str, **more: Any) -> Case:
    case = next(case for case in CASES if case.name == name)
    return Case(case.name, case.model_type, {**case.extra, **SIZES, **more})


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


def packed_stack(
    tensors: dict[str, torch.Tensor], name: str, writer: Writer, random: np.random.Generator
) -> None:
    """Put blocks and scales of all experts in place of a tensor [E, inputs, outputs], whose numbers
    become theirs."""
    stacked = tensors.pop(name)
    _, inputs, outputs = stacked.shape
    written = [writer(outputs, inputs, random) for _ in stacked]
    for kind in ("blocks", "scales"):
        tensors[f"{name}_{kind}"] = torch.stack([own[f"weight_{kind}"] for own, _ in written])
    stacked.copy_(torch.stack([numbers.t() for _, numbers in written]))


@pytest.fixture
def gpt_oss(tmp_path: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A folder as gpt-oss is published, one with the same numbers, and these."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for folder in (packed, plain):
        write_checkpoint(case_of("gpt-oss"), folder)
    numbers = load_file(plain / "model.safetensors")
    tensors = dict(numbers)
    random = np.random.default_rng(3)
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            packed_stack(tensors, name, mxfp4(blocks=True), random)
    rewrite(packed, tensors, MXFP4)
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    return packed, plain, numbers


def test_experts_of_gpt_oss_keep_4_bits(
    gpt_oss: tuple[Path, Path, dict[str, torch.Tensor]],
) -> None:
    """Turns red when rows of gate and up are not those of the checkpoint, or are widened."""
    packed, _, numbers = gpt_oss
    found = read_checkpoint(packed).tensors
    assert not any("blocks" in name for name in found)
    layout = found["model.layers.1.mlp.experts.2.up_proj.weight"].packed
    assert layout is not None
    assert layout.kernel_on("cpu") == "blocks-e2m1-32"
    model: Any = PagedModel(packed, "reference").model
    for layer, block in enumerate(model.blocks):
        for expert in range(5):
            matrix = block.moe.experts.down[expert].weights.matrix
            wanted = numbers[f"model.layers.{layer}.mlp.experts.down_proj"][expert].t()
            assert torch.equal(matrix.rows(torch.arange(len(wanted))), wanted)


@pytest.mark.parametrize("implementation", ["reference", "best"])
def test_logits_of_gpt_oss_are_those_of_its_numbers(
    gpt_oss: tuple[Path, Path, dict[str, torch.Tensor]], implementation: str
) -> None:
    """Turns red when gate and up change places, a bias is left out, or an expert has another's
    rows. Activations have 8 bits."""
    packed, plain, _ = gpt_oss
    sequences = random_sequences()
    got = PagedModel(packed, implementation).step(sequences)
    wanted = PagedModel(plain, implementation).step(sequences)
    for seq, logits in wanted.items():
        assert (got[seq] - logits).norm() <= 0.03 * logits.norm()


@pytest.mark.parametrize("implementation", ["reference", "best"])
def test_experts_take_activations_of_16_bits(
    gpt_oss: tuple[Path, Path, dict[str, torch.Tensor]], implementation: str
) -> None:
    """Turns red when the calls that experts record multiply integers anyway."""
    packed, plain, _ = gpt_oss
    sequences = random_sequences()
    formats = QuantizedFormats(None, new_ops(implementation).with_activation_bits(16))
    got = PagedModel(packed, implementation, formats=formats).step(sequences)
    wanted = PagedModel(plain, implementation).step(sequences)
    for seq, logits in wanted.items():
        assert (got[seq] - logits).norm() <= 1e-4 * logits.norm()


@pytest.mark.parametrize("implementation", ["reference", "best"])
def test_experts_with_matrices_of_their_own(implementation: str, tmp_path: Path) -> None:
    """Turns red when a format that other models are published in does not reach experts."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for folder in (packed, plain):
        write_checkpoint(case_of("qwen3-moe", moe_intermediate_size=96), folder)
    numbers = load_file(plain / "model.safetensors")
    tensors, random = dict(numbers), np.random.default_rng(3)
    for name, weight in numbers.items():
        if ".experts." in name:
            outputs, inputs = weight.shape
            own, matrix = GPTQ.write(outputs, inputs, random)
            module = name.removesuffix(".weight")
            del tensors[name]
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in own.items()}
            numbers[name] = matrix
    rewrite(packed, tensors, dict(GPTQ.settings))
    save_file(
        {name: tensor.contiguous() for name, tensor in numbers.items()},
        plain / "model.safetensors",
        {"format": "pt"},
    )
    sequences = random_sequences()
    got = PagedModel(packed, implementation).step(sequences)
    wanted = PagedModel(plain, implementation).step(sequences)
    for seq, logits in wanted.items():
        assert (got[seq] - logits).norm() <= 0.03 * logits.norm()
