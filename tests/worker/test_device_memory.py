"""Bytes of a GPU's memory that are counted, and a GPU that does not start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.base.errors import ConfigError
from quire.compute.worker.device_memory import CudaMemory
from quire.compute.worker.load import open_device
from tests.config.specs import GIB, make_gpu_platform

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """torch's counters: `context` is taken beside what torch has reserved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.others, self.context = 80 * GIB, 5 * GIB, GIB
        self.reserved, self.allocated, self.peak, self.ooms = 10 * GIB, 8 * GIB, 10 * GIB, 0
        fakes = {
            "mem_get_info": lambda device: (self._free(), self.total),
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.reserved,
            "max_memory_reserved": lambda device: self.peak,
            "memory_stats": lambda device: {"num_ooms": self.ooms},
            "reset_peak_memory_stats": self._reset,
            "empty_cache": self._empty,
            "synchronize": lambda device: None,
        }
        for name, fake in fakes.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, fake)

    def _free(self) -> int:
        return self.total - self.others - self.context - self.reserved

    def _reset(self, device: torch.device) -> None:
        del device
        self.peak = self.reserved

    def _empty(self) -> None:
        self.reserved = self.allocated


def test_all_that_the_process_takes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when the driver's context, or what other programs have, is counted wrongly."""
    cuda = FakeCuda(monkeypatch)
    memory = CudaMemory(DEVICE, free=75 * GIB)  # before the context was made
    assert (memory.total, memory.free) == (80 * GIB, 75 * GIB)
    assert memory.tensors() == 8 * GIB
    assert memory.held() == 8 * GIB + GIB
    memory.watch()
    cuda.reserved = cuda.peak = 12 * GIB
    cuda.context = 2 * GIB  # kernels were loaded
    cuda.reserved = 11 * GIB
    assert memory.most_held() == 12 * GIB + 2 * GIB
    assert memory.num_refused() == 0
    cuda.ooms = 3
    assert memory.num_refused() == 3
    memory.watch()
    assert memory.num_refused() == 0


def test_where_nobody_looked_before_the_context_counts_as_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.reserved = cuda.allocated = 0
    memory = CudaMemory(DEVICE, free=0)
    assert memory.free == 74 * GIB
    cuda.reserved = cuda.allocated = GIB
    assert memory.held() == GIB


def test_a_gpu_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("The NVIDIA driver on your\n system is too old")

    monkeypatch.setattr(torch.cuda, "init", fails)
    platform = replace(make_gpu_platform(), device="cuda")
    with pytest.raises(ConfigError, match=r"on your system is too old\. Or give device='cpu'"):
        open_device(platform)
    assert open_device(replace(platform, device="cpu")).type == "cpu"
