"""Every GGUF type reads as the integers that an independent writer packed."""

from __future__ import annotations

import pytest
import torch

from quire.compute.quantization.gguf import DEQUANTIZE, dequantize
from quire.config.gguf import GGML_TYPES
from tests.gguf_writer import PACKERS, random_tensor


@pytest.mark.parametrize("kind", PACKERS)
def test_blocks_read_as_they_were_packed(kind: str) -> None:
    """Catches a nibble, a sign or a scale in the wrong place."""
    for seed, d in enumerate((0.5, -0.125, 0.0)):
        tensor, numbers = random_tensor(kind, (8, 512), seed, d)
        blocks = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(8, -1)
        assert torch.equal(dequantize(kind, blocks), numbers)


def test_plain_types() -> None:
    for name in ("float32", "float16", "bfloat16"):
        values = torch.randn(3, 8).to(getattr(torch, name))
        kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[name]
        assert torch.equal(dequantize(kind, values.view(torch.uint8)), values.float())


def test_types_of_the_header_are_those_that_can_be_read() -> None:
    """Catches a type that a plan accepts and no loader knows, or blocks of another size."""
    sizes = {kind.name: kind.block_bytes for kind in GGML_TYPES.values()}
    assert sizes == {name: size for name, (_, size) in DEQUANTIZE.items()}


@pytest.mark.parametrize("kind", [name for name in DEQUANTIZE if name in PACKERS])
def test_a_definition_stays_on_its_device(kind: str) -> None:
    """A GPU widens blocks by the definition. Turns red when one makes a tensor on the host, which
    torch refuses to mix with others (here, with those of a device without numbers)."""
    size = DEQUANTIZE[kind][1]
    assert dequantize(kind, torch.empty(3, 2 * size, dtype=torch.uint8, device="meta")).is_meta
