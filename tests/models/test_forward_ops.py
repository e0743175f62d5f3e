"""Between a step's inputs and its logits nothing computes but operations of `quire.ops`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.families import CASES, Case, write_checkpoint
from tests.models.harness import PagedModel
from torch.utils._python_dispatch import TorchDispatchMode

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS

PLATFORM = detect_platform()
KERNELS = any(p.unavailable(PLATFORM) is None for p in ALL_OPS["linear"].providers)

LAYOUT = {
    "empty", "empty_like", "new_empty", "view", "_unsafe_view", "slice", "select", "as_strided",
    "alias",
}  # fmt: skip
"""Functions of torch that make or describe a tensor and compute nothing."""


class Computing(TorchDispatchMode):
    """Collects what torch itself computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if name not in LAYOUT:
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path]:
    folder = tmp_path_factory.mktemp(request.param.name)
    write_checkpoint(request.param, folder, torch.bfloat16)
    return request.param, folder


@pytest.mark.skipif(not KERNELS, reason="no compiled kernels here")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_decode_forward_is_operations_alone(
    checkpoint: tuple[Case, Path], quantization: str | None
) -> None:
    """Turns red when a layer adds, converts or copies by itself: on one thread, by other bits for
    another number of rows, and unseen by whoever records the operations of a step."""
    case, folder = checkpoint
    paged = PagedModel(folder, "best", case.max_positions, quantization)
    if paged.backend_name == "reference":
        pytest.skip("no kernel does what this model's attention does")
    paged.step({0: [3, 1, 4], 1: [5]})
    inputs = paged.inputs({0: [2], 1: [7]})
    computing = Computing()
    with torch.no_grad(), computing:
        paged.model.logits(paged.model.forward(*inputs))
    assert not computing.seen
