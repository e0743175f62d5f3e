"""The facts of one GPU, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GpuFacts", "GpuSearch"]


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """vendor: "nvidia" or "amd". architecture: name for people and compilers ("SM 90", "gfx942").

    capability: CUDA's compute capability (major, minor), None for AMD. memory_bytes, free_bytes:
    size of the device and memory that no program uses, 0 if the device does not say. driver: its
    version, empty if unknown. driver_cuda: the newest CUDA that the driver serves, None for AMD.
    num_visible: GPUs that this process may see; this is the first of them.
    """

    vendor: str
    name: str
    architecture: str
    capability: tuple[int, int] | None
    memory_bytes: int
    free_bytes: int
    driver: str
    driver_cuda: tuple[int, int] | None
    num_visible: int = 1


@dataclass(frozen=True, slots=True)
class GpuSearch:
    """A driver's answer. gpus: GPUs that this process may see, in order. num_present: GPUs of the
    machine, visible or not. failure: reason why the driver does not answer, and what to do; None if
    it answers or is absent."""

    gpus: tuple[GpuFacts, ...] = ()
    num_present: int = 0
    failure: str | None = None
