"""A worker that falls asleep frees what it drops, however that is held, and visits little else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.compute.worker.weight_stash import DroppedTensors, reachable_tensors
from tests.small_engines import small_engines


class Cycle:
    """Garbage that the collector alone finds."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(2)
        self.itself = self


@pytest.fixture
def frozen_garbage() -> Iterator[weakref.ref[Cycle]]:
    """An object of which the collector hears only if it visits what start-up has frozen."""
    cycle = Cycle()
    found = weakref.ref(cycle)
    gc.freeze()
    del cycle
    yield found
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def test_tensors_that_nobody_holds_leave_frozen_objects_alone(
    frozen_garbage: weakref.ref[Cycle],
) -> None:
    held, roots = torch.zeros(2), [torch.zeros(2)]
    dropped = DroppedTensors([held, *roots])
    gone = weakref.ref(roots.pop())
    dropped.collect([held])
    assert gone() is None
    assert frozen_garbage() is not None


def test_tensors_in_frozen_cycles_are_freed(frozen_garbage: weakref.ref[Cycle]) -> None:
    """Turns red when an engine that has frozen what its start made sleeps beside its weights."""
    cycle = frozen_garbage()
    assert cycle is not None
    tensor = weakref.ref(cycle.tensor)
    dropped = DroppedTensors(cycle.tensor)
    del cycle
    num_frozen = gc.get_freeze_count()
    dropped.collect([])
    assert frozen_garbage() is None and tensor() is None
    assert gc.get_freeze_count() > num_frozen // 2, "the rest is frozen again"


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_was_frozen_sleeps_without_its_tensors(level: int) -> None:
    """Its model has a cycle: a layer with adapters. Level 1 keeps the weights."""
    with small_engines(None, enable_lora=True, swap_space="1MiB") as make:
        llm = make()
        client: Any = llm.engine.client
        worker = client._core._executor._worker
        gc.freeze()
        kept = set(map(id, reachable_tensors(worker._loaded))) if level == 1 else set[int]()
        parts = (worker._assembly, worker._loaded)
        tensors = [weakref.ref(each) for each in reachable_tensors(parts) if id(each) not in kept]
        del parts
        llm.sleep(level)
        assert len(tensors) > 20
        assert not any(each() is not None for each in tensors)
        llm.wake_up()
        (output,) = llm.generate([{"prompt_token_ids": [5, 6]}], use_tqdm=False)
        assert output.error is None
