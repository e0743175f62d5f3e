"""Quantized folders give the logits of the numbers that an independent writer packed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.models.harness import PagedModel, new_ops
from tests.packed_writer import FORMATS, Format, all_but_head, write_pair

from quire.config import read_checkpoint
from quire.models.loader import read_packed
from quire.ops.linear.int8.activations import quantize_rows
from quire.quantization.packed import keep

SEQUENCES = {0: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 1: [8], 2: [9, 7, 9, 3, 2]}
FORMATS_BY_NAME = {each.name: each for each in FORMATS}


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_numbers_are_those_that_were_packed(name: str, tmp_path: Path) -> None:
    """Catches a field, a zero point or a scale in the wrong place, in what is stored and in what
    the kernel of the format makes of it."""
    chosen = FORMATS_BY_NAME[name]
    folder, _, numbers = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    tensors = read_checkpoint(folder).tensors
    for module, wanted in numbers.items():
        layout = tensors[f"{module}.weight"].packed
        assert layout is not None
        assert layout.kernel == chosen.kernel
        stored = read_packed(layout)
        assert torch.equal(stored.numbers(), wanted)
        assert torch.equal(stored.numbers(37, 50), wanted[37:50])
        matrix = keep(new_ops("reference"), (stored,), None, torch.float32).matrix
        ids = torch.tensor([0, 5, 31, 5])
        assert torch.equal(matrix.rows(ids), wanted[ids])
        x = torch.randn(3, wanted.shape[1])
        rounded, scale = quantize_rows(x) if chosen.kernel else (x, torch.ones(3, 1))
        torch.testing.assert_close(matrix(x), (rounded * scale) @ wanted.t(), rtol=0, atol=1e-4)


def run(folder: Path, chunks: tuple[int, ...] = (64,)) -> dict[int, torch.Tensor]:
    """Logits of all tokens, fed by so many of a sequence at a time."""
    model = PagedModel(folder, "reference", 64)
    found: dict[int, list[torch.Tensor]] = {seq: [] for seq in SEQUENCES}
    left = {seq: list(tokens) for seq, tokens in SEQUENCES.items()}
    sizes = list(chunks)
    while left:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        step = {seq: tokens[:size] for seq, tokens in left.items()}
        for seq, logits in model.step(step).items():
            found[seq].append(logits)
        left = {seq: tokens[size:] for seq, tokens in left.items() if len(tokens) > size}
    return {seq: torch.cat(pieces) for seq, pieces in found.items()}


def close(found: Mapping[int, torch.Tensor], wanted: Mapping[int, torch.Tensor], by: float) -> None:
    for seq, logits in wanted.items():
        torch.testing.assert_close(found[seq], logits, rtol=0, atol=by)


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_logits_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    """Prefill as a whole, in chunks, and tokens one by one. Catches parts of a merged layer in
    the wrong order, and biases that are lost."""
    chosen: Format = FORMATS_BY_NAME[name]
    packed, plain, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    wanted = run(plain)
    assert max(float(logits.std()) for logits in wanted.values()) > 0.3
    # 8-bit activations: 1/254 of the largest of each row, over a few layers.
    tolerance = 1e-4 if chosen.kernel is None else 0.25
    found = run(packed)
    close(found, wanted, tolerance)
    close(run(packed, (4, 3, 1)), found, 1e-4)
