"""With the C++ kernels a model gives a sequence the same bits whatever shares its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.families import CASES, random_sequences, write_checkpoint
from tests.models.harness import PagedModel

from quire.ops import build_op_set
from quire.platform import detect_platform

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-tied", "qwen3", "opt", "gpt2"])
def test_logits_alone_in_a_batch_and_in_chunks(name: str, tmp_path: Path) -> None:
    """Turns red when any operation between token ids and logits rounds by the batch's size."""
    if not build_op_set(detect_platform()).chosen["linear"].startswith("cpu_"):
        pytest.skip("no C++ kernels here")
    case = BY_NAME[name]
    write_checkpoint(case, tmp_path)
    sequences = random_sequences(case.lengths)
    batched = PagedModel(tmp_path, "best", case.max_positions).step(sequences)
    for seq, tokens in sequences.items():
        alone = PagedModel(tmp_path, "best", case.max_positions)
        assert torch.equal(alone.step({seq: tokens})[seq], batched[seq])
        chunked = PagedModel(tmp_path, "best", case.max_positions)
        pieces = [chunked.step({seq: [token]})[seq] for token in tokens]
        assert torch.equal(torch.cat(pieces), batched[seq])
