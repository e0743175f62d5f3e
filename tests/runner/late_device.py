"""Engines whose rows live on a device, here the CPU, that is as late as a device may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.compute.runner.device.queue import Arrival, HostQueue, Mark
from quire.compute.worker import worker as worker_module
from quire.compute.worker.assemble import assemble
from quire.compute.worker.assemble_device import MakeRecorder, assemble_on_device
from quire.compute.worker.load import load

__all__ = ["LateQueue", "keep_rows_on_device"]


class LateQueue(HostQueue):
    """Results are read when they are waited for, and a host buffer that changes before its mark was
    waited for is found."""

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        target.copy_(source)
        return _Unchanged(source)

    def copy_out(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        return _Late(tensors)


class _Unchanged:
    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._words = source.clone()

    def wait(self) -> None:
        assert torch.equal(self._source, self._words), "the device may have read other words"


class _Late:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[np.ndarray]:
        return [tensor.numpy().copy() for tensor in self._tensors]


def keep_rows_on_device(
    monkeypatch: pytest.MonkeyPatch,
    on_device: Callable[[], bool] = lambda: True,
    make_recorder: MakeRecorder | None = None,
) -> None:
    """Engines that start from now on, while `on_device` says so."""

    def choose(loaded: Any, settings: Any, size: Any, media: Any) -> Any:
        if on_device():
            return assemble_on_device(loaded, settings, size, media, LateQueue(), make_recorder)
        return assemble(loaded, settings, size, media)

    def load_for(settings: Any, device: torch.device) -> Any:
        return load(replace(settings, device_state=on_device()), device)

    monkeypatch.setattr(worker_module, "assemble", choose)
    monkeypatch.setattr(worker_module, "load", load_for)
