"""Facts of GPUs, from a management library and from files that tests make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from quire.base.platform import amd, nvml
from quire.base.platform.gpu import FoundGpu, detect_gpu
from quire.base.platform.gpu_facts import GpuSearch
from quire.base.platform.torch_build import TorchBuild, find_torch_build
from tests.platform.fake_nvml import FakeGpu, FakeNvml

CUDA_TORCH = TorchBuild("2.11.0+cu128", (12, 8), None)
ROCM_TORCH = TorchBuild("2.11.0+rocm7.0", None, (7, 0))
GIB = 2**30


def nothing(visible: str | None) -> GpuSearch:
    del visible
    return GpuSearch()


def detect(library: FakeNvml, torch: TorchBuild = CUDA_TORCH) -> FoundGpu:
    return detect_gpu(partial(nvml.search_gpus, library=library), nothing, torch)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_a_gpu_is_described_without_torch() -> None:
    """Turns red when an answer of the driver lands in the wrong fact."""
    library = FakeNvml([FakeGpu("GPU-1", "NVIDIA H200", total=141 * GIB, free=140 * GIB)])
    found = detect(library)
    assert found.problem is None
    assert found.gpu is not None
    assert (found.gpu.name, found.gpu.architecture) == ("NVIDIA H200", "SM 90")
    assert (found.gpu.memory_bytes, found.gpu.free_bytes) == (141 * GIB, 140 * GIB)
    assert (found.gpu.driver, found.gpu.driver_cuda) == ("570.86.10", (12, 8))
    assert library.num_open == 0


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["a", "b", "c"]),
        ("1", ["b"]),
        ("2,0", ["c", "a"]),
        ("GPU-bb", ["b"]),
        ("0,7,1", ["a"]),  # as for CUDA, what follows a wrong one is hidden
        ("-1", []),
        ("", []),
        ("GPU-", []),  # the beginning of all three
    ],
)
def test_the_visible_gpus_are_those_of_cuda(visible: str | None, names: list[str]) -> None:
    gpus = [FakeGpu("GPU-aa", "a"), FakeGpu("GPU-bb", "b"), FakeGpu("GPU-cc", "c")]
    found = nvml.search_gpus(visible, FakeNvml(gpus))
    assert [gpu.name for gpu in found.gpus] == names
    assert {gpu.num_visible for gpu in found.gpus} <= {len(names)}
    assert found.num_present == 3


@pytest.mark.parametrize("visible", [None, "0", "MIG-1", "GPU-aa"])
def test_a_gpu_that_is_cut_into_parts_is_one_of_them(visible: str | None) -> None:
    """Turns red when a part is planned with the memory of the whole GPU."""
    library = FakeNvml([FakeGpu("GPU-aa", parts=("MIG-1", "MIG-2"))])
    (gpu,) = nvml.search_gpus(visible, library).gpus
    assert gpu.memory_bytes == 40 * GIB
    assert gpu.capability == (9, 0)


def test_memory_that_is_the_hosts_is_unknown() -> None:
    found = detect(FakeNvml([FakeGpu("GPU-1", total=0)]))
    assert found.gpu is not None
    assert found.problem is None
    assert found.gpu.memory_bytes == found.gpu.free_bytes == 0


@pytest.mark.parametrize(
    ("library", "torch", "advice"),
    [
        (FakeNvml([], failure=9), CUDA_TORCH, "driver is not loaded.*container"),
        (FakeNvml([], failure=18), CUDA_TORCH, "restart the machine"),
        (FakeNvml([], failure=999), CUDA_TORCH, "code 999.*nvidia-smi"),
        (FakeNvml([]), CUDA_TORCH, "no GPU with a driver.*--gpus all"),
        (
            FakeNvml([FakeGpu("GPU-1")]),
            TorchBuild("2.13.0+cpu", None, None),
            r"2\.13\.0\+cpu is built without CUDA",
        ),
        (FakeNvml([FakeGpu("GPU-1")]), ROCM_TORCH, "without CUDA"),
        (
            FakeNvml([FakeGpu("GPU-1")], cuda=11040),
            CUDA_TORCH,
            r"CUDA 11\.4 .*needs CUDA 12: update the driver",
        ),
        (FakeNvml([FakeGpu("GPU-1", capability=(7, 5))]), CUDA_TORCH, "SM 75.*SM 80 or later"),
    ],
)
def test_what_stands_in_the_way_comes_with_advice(
    library: FakeNvml, torch: TorchBuild, advice: str
) -> None:
    import re

    found = detect(library, torch)
    assert found.problem is not None
    assert re.search(advice, found.problem), found.problem


def test_a_newer_minor_version_than_the_drivers_is_no_problem() -> None:
    assert detect(FakeNvml([FakeGpu("GPU-1")], cuda=12020)).problem is None


def test_hidden_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = detect(FakeNvml([FakeGpu("GPU-1")]))
    assert found.gpu is None
    assert "CUDA_VISIBLE_DEVICES='' names none of the 1 GPUs" in (found.problem or "")


def test_a_library_without_a_function_is_a_failure() -> None:
    """Drivers of other years lack some of them."""
    found = nvml.search_gpus(None, object())
    assert found.failure is not None
    assert "13" in found.failure


def write_amd_gpu(system: Path, node: int, minor: int, target: int) -> None:
    folder = system / f"class/kfd/kfd/topology/nodes/{node}"
    folder.mkdir(parents=True)
    lines = ["simd_count 304", f"gfx_target_version {target}", f"drm_render_minor {minor}"]
    (folder / "properties").write_text("\n".join(lines) + "\n")
    card = system / f"class/drm/renderD{minor}/device"
    card.mkdir(parents=True)
    (card / "mem_info_vram_total").write_text(f"{192 * GIB}\n")
    (card / "mem_info_vram_used").write_text(f"{2 * GIB}\n")


@pytest.fixture
def amd_search(tmp_path: Path) -> Callable[[str | None], GpuSearch]:
    """A processor and two GPUs."""
    write_amd_gpu(tmp_path, 0, 0, 0)
    write_amd_gpu(tmp_path, 1, 128, 90402)
    write_amd_gpu(tmp_path, 10, 129, 90010)
    return partial(amd.search_gpus, system=tmp_path)


def test_amd_gpus_are_read_from_the_kernels_files(
    amd_search: Callable[[str | None], GpuSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = detect_gpu(nothing, amd_search, ROCM_TORCH)
    assert found.problem is None
    assert found.gpu is not None
    assert (found.gpu.vendor, found.gpu.architecture) == ("amd", "gfx942")
    assert (found.gpu.memory_bytes, found.gpu.free_bytes) == (192 * GIB, 190 * GIB)
    assert found.gpu.num_visible == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    second = detect_gpu(nothing, amd_search, ROCM_TORCH).gpu
    assert second is not None
    assert second.architecture == "gfx90a"
    assert "without ROCm" in (detect_gpu(nothing, amd_search, CUDA_TORCH).problem or "")


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (
            "__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None",
            CUDA_TORCH,
        ),
        (
            "__version__ = '2.13.0+cpu'\ncuda = None\nhip = None",
            TorchBuild("2.13.0+cpu", None, None),
        ),
        (
            "__version__ = '2.11.0+rocm7.0'\ncuda: Optional[str] = None\n"
            "hip: Optional[str] = '7.0.51831-a3e329ad8'",
            ROCM_TORCH,
        ),
        ("", TorchBuild("", None, None)),
    ],
)
def test_what_torch_was_built_for_is_read_from_its_files(
    tmp_path: Path, text: str, build: TorchBuild
) -> None:
    (tmp_path / "version.py").write_text(f"from typing import Optional\n{text}\n")
    assert find_torch_build(tmp_path) == build


def test_the_installed_torch_is_found() -> None:
    assert find_torch_build().version
