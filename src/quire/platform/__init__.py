"""What the machine is: processor features, cores, caches, memory. No torch."""

from quire.platform.cpu import CpuFacts, detect_cpu
from quire.platform.facts import Platform, detect_platform

__all__ = ["CpuFacts", "Platform", "detect_cpu", "detect_platform"]
