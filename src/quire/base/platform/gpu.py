"""Facts of the GPU, and whether this installation can compute on it. No torch is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from quire.base.platform import amd, nvml
from quire.base.platform.gpu_facts import GpuFacts, GpuSearch
from quire.base.platform.torch_build import TorchBuild, find_torch_build

__all__ = ["MIN_CAPABILITY", "FoundGpu", "detect_gpu"]

MIN_CAPABILITY = (8, 0)
"""NVIDIA architectures before SM 80 have no bfloat16 and no asynchronous copies."""

_NVIDIA_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
_AMD_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The first one that is set counts."""


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """gpu: the first that this process may see, whether it can serve or not; None if there is none.
    problem: reason why no engine can compute on a GPU here, and what to do; None if one can."""

    gpu: GpuFacts | None
    problem: str | None


def detect_gpu(
    search_nvidia: Callable[[str | None], GpuSearch] = nvml.search_gpus,
    search_amd: Callable[[str | None], GpuSearch] = amd.search_gpus,
    torch: TorchBuild | None = None,
) -> FoundGpu:
    """Look for a GPU of either vendor, as the variables that choose among several of them say.

    The searches take the value of such a variable, None if it is unset. torch: the installed build.
    """
    torch = torch or find_torch_build()
    for search, variables in ((search_nvidia, _NVIDIA_VARIABLES), (search_amd, _AMD_VARIABLES)):
        variable = next((name for name in variables if name in os.environ), variables[0])
        visible = os.environ.get(variable)
        found = search(visible)
        if found.gpus:
            first = found.gpus[0]
            return FoundGpu(first, _problem_of(first, torch))
        if found.num_present:
            return FoundGpu(
                None,
                f"{variable}={visible!r} names none of the {found.num_present} GPUs of this "
                "machine: unset it, or give the number of one",
            )
        if found.failure is not None:
            return FoundGpu(None, found.failure)
    return FoundGpu(
        None,
        "there is no GPU with a driver: install the driver, or start the container with its GPUs "
        "(docker run --gpus all)",
    )


def _problem_of(gpu: GpuFacts, torch: TorchBuild) -> str | None:
    """Why torch, the driver and the GPU do not work together, or None."""
    runtime = torch.cuda if gpu.vendor == "nvidia" else torch.hip
    if runtime is None:
        name = "CUDA" if gpu.vendor == "nvidia" else "ROCm"
        return (
            f"torch {torch.version} is built without {name}, for which the {gpu.name} asks: "
            f"install a build of torch for {name}"
        )
    if gpu.driver_cuda is not None and gpu.driver_cuda[0] < runtime[0]:
        # Within one major version new runtimes run on old drivers (CUDA's minor compatibility).
        return (
            f"driver {gpu.driver} serves CUDA {_dotted(gpu.driver_cuda)} and torch "
            f"{torch.version} needs CUDA {runtime[0]}: update the driver, or install a build of "
            f"torch for CUDA {gpu.driver_cuda[0]}"
        )
    if gpu.capability is not None and gpu.capability < MIN_CAPABILITY:
        return f"the {gpu.name} is {gpu.architecture}, and the kernels need SM 80 or later"
    return None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
