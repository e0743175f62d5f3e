"""Activations with large outliers, as models of billions of parameters have them, in 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.compute.quantization import MatrixFormats, quantize_int8
from quire.compute.quantization.weight_format import WidensStored
from quire.config import MatrixShape
from quire.ops import PackedMatrix
from quire.ops.linear.blocks.contract import quantize_groups
from quire.ops.linear.plain.reference import PlainMatrix
from tests.models.families import Case, write_checkpoint
from tests.models.harness import PagedModel

WIDTH = 256
CASE = Case(
    "llama-wide",
    "llama",
    {
        "hidden_size": WIDTH,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
    },
)
CHANNELS = {3: 20.0, 77: 50.0, 140: 100.0}
"""Factors of a few channels: LLM.int8 (Dettmers et al., 2022, arXiv:2208.07339), section 4."""

MASSIVE = {5: 300.0, 60: 500.0}
"""Numbers of a channel in a few tokens: Sun et al., 2024, arXiv:2402.17762, section 2."""

MASSIVE_CHANNEL = 200
GROUP = 32
SEQUENCES = {seq: [(7 * seq + 5 * i + i * i) % 96 for i in range(60)] for seq in range(4)}


class PerBlock(WidensStored):
    """Weights of `int8`, and activations in 8 bits with a scale for each token and 32 inputs."""

    def choose(self, shape: MatrixShape) -> PerBlock:
        del shape
        return self

    def cut(self, inputs: range) -> None:
        """No test cuts it."""

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        values, scale = quantize_int8(weight)
        return PerBlockMatrix(values * scale[:, None], bias, gate=gate)


class PerBlockMatrix(PlainMatrix):
    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        integers, scale = quantize_groups(x, GROUP)
        return super().__call__((integers * scale).flatten(1), out_dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random model with planted outliers in what its norms give and in some tokens."""
    write_checkpoint(CASE, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            for channel, factor in CHANNELS.items():
                tensor[channel] *= factor
        elif name.endswith(("proj.weight", "lm_head.weight")):
            tensor *= 0.1  # so that attention and logits keep the size that trained models have
    for token, size in MASSIVE.items():
        tensors["model.embed_tokens.weight"][token, MASSIVE_CHANNEL] = size
    save_file(tensors, file, {"format": "pt"})
    return tmp_path


def logs(
    folder: Path, formats: MatrixFormats | None = None, quantization: str | None = None
) -> torch.Tensor:
    model = PagedModel(folder, "reference", 64, quantization, formats=formats)
    return torch.cat([logits.float().log_softmax(1) for logits in model.step(SEQUENCES).values()])


def test_rotated_int8_is_as_good_as_a_scale_per_block(folder: Path) -> None:
    """Turns red when outliers take the bits of all other inputs of a token."""
    exact = logs(folder)

    def divergence(got: torch.Tensor) -> float:
        return float((exact.exp() * (exact - got)).sum(1).mean())

    rotated = divergence(logs(folder, quantization="int8"))
    by_block = divergence(logs(folder, PerBlock()))
    assert by_block > 0
    assert rotated <= 1.5 * by_block, (rotated, by_block)
