"""Tokens that rows have no room for."""

from __future__ import annotations

import pytest
import torch

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.ops import ALL_OPS
from quire.ops.operation import Provider

OP = ALL_OPS["append_tokens"]
KERNELS = [each for each in OP.providers if each.name.startswith("cpu_")]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: each.name)
def test_a_full_row_is_refused_and_no_row_changes(kernel: Provider) -> None:
    """Turns red when a step that was planned too far writes into the next row."""
    reason = kernel.unavailable(detect_platform())
    if reason is not None:
        pytest.skip(reason)
    slots, token_ids = torch.tensor([0, 1, 2]), torch.tensor([7, 8, 9], dtype=torch.int32)
    rows, counts = torch.zeros((3, 4), dtype=torch.int32), torch.tensor([2, 4, 3])
    computed = counts - 1
    state = (computed, counts, rows)
    before = [tensor.clone() for tensor in state]
    append = kernel.load()
    with pytest.raises(EngineError, match="append_tokens failed with code 3"):
        append(slots, token_ids, *state, -1, None)
    assert all(map(torch.equal, state, before))
    positions = torch.zeros(3, dtype=torch.int64)
    append(slots, token_ids, *state, 1, positions)
    assert positions.tolist() == [3, 4, 4]
    assert counts.tolist() == [3, 4, 4]
    assert rows[:, 2:].tolist() == [[7, 0], [0, 0], [0, 9]]
