"""A forward that is asked for some tokens' hidden states computes no others behind its last
attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.families import CASES, Case, random_sequences, write_checkpoint
from tests.models.harness import PagedModel


class SeenRows:
    """Stands before a layer and notes how many rows each call has."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.counts: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.counts.append(len(x))
        return self._layer(x)


@pytest.mark.parametrize("implementation", ["reference", "best"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hidden_states_of_wanted_tokens(case: Case, implementation: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    model = PagedModel(tmp_path, implementation, case.max_positions)
    token_ids, positions, step = model.inputs(random_sequences(case.lengths))
    wanted = torch.tensor([len(token_ids) - 1, 0, 3])
    layers: Any = model.model
    seen = [SeenRows(block.output) for block in layers.blocks]
    for block, output in zip(layers.blocks, seen, strict=True):
        block.output = output
    with torch.inference_mode():
        everything = model.model.forward(token_ids, positions, step)
        some = model.model.forward(token_ids, positions, replace(step, wanted_tokens=wanted))
    torch.testing.assert_close(some, everything[wanted])
    if implementation == "best" and model.backend_name != "reference":
        assert torch.equal(some, everything[wanted])
    whole = len(token_ids)
    assert [each.counts for each in seen] == [[whole, whole]] * (len(seen) - 1) + [[whole, 3]]
