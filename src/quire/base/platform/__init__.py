"""Facts of the machine: processor features, cores, caches, memory, GPU. No torch."""

from quire.base.platform.cpu import CpuFacts, detect_cpu
from quire.base.platform.facts import Platform, detect_platform
from quire.base.platform.gpu import FoundGpu, detect_gpu
from quire.base.platform.gpu_facts import GpuFacts

__all__ = [
    "CpuFacts",
    "FoundGpu",
    "GpuFacts",
    "Platform",
    "detect_cpu",
    "detect_gpu",
    "detect_platform",
]
