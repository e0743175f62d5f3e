"""Facts of the machine: processor features, cores, caches, memory, GPU. No torch."""

from quire.platform.cpu import CpuFacts, detect_cpu
from quire.platform.facts import Platform, detect_platform
from quire.platform.gpu import FoundGpu, detect_gpu
from quire.platform.gpu_facts import GpuFacts

__all__ = [
    "CpuFacts",
    "FoundGpu",
    "GpuFacts",
    "Platform",
    "detect_cpu",
    "detect_gpu",
    "detect_platform",
]
