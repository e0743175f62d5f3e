"""The doctor finds a kernel that computes something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from quire.base.errors import ConfigError
from quire.base.platform.torch_build import TorchBuild, torch_sizes
from quire.entrypoints.bench import diagnosis
from quire.entrypoints.bench.diagnosis import diagnose, render_diagnosis
from quire.entrypoints.cli.main import main
from quire.ops import ALL_OPS, CheckReport, Op, Provider, force_gpu_kernels
from tests.config.specs import make_gpu_platform, make_platform

NORM = ALL_OPS["rms_norm"]


def with_provider(name: str, load: object, unavailable: str | None = None) -> Op:
    """rms_norm with one provider of the test's own."""
    provider = Provider(name, lambda platform: unavailable, lambda: load)  # type: ignore[arg-type]
    return Op(NORM.name, NORM.reference, NORM.make_inputs, NORM.tolerance, (provider,))


def examine(monkeypatch: pytest.MonkeyPatch, op: Op) -> diagnosis.Diagnosis:
    monkeypatch.setattr(diagnosis, "ALL_OPS", MappingProxyType({op.name: op}))
    return diagnose()


def test_right_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(monkeypatch, with_provider("same", NORM.reference))
    assert found.ok
    assert found.ops[0].providers[0].num_cases > 0
    assert render_diagnosis(found).endswith("all 1 kernels agree with their references")


def test_wrong_kernel_fails_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A diagnosis that only prints would let a broken machine pass in a script."""

    def doubled(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return 2 * NORM.reference(*args, **kwargs)

    found = examine(monkeypatch, with_provider("doubled", doubled))
    assert not found.ok
    assert "rms_norm by doubled" in render_diagnosis(found)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["ops"][0]["providers"][0]["failures"]


def test_kernel_that_raises_is_reported_and_the_others_are_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("no such luck")

    found = examine(monkeypatch, with_provider("broken", broken))
    assert not found.ok
    assert "raised ValueError: no such luck" in render_diagnosis(found)


def test_kernel_that_this_machine_lacks_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(monkeypatch, with_provider("elsewhere", None, "the processor lacks it"))
    assert found.ok
    assert found.ops[0].chosen == "reference" or found.ops[0].chosen.startswith("cpu")
    assert found.as_json()["ops"][0]["providers"][0]["unavailable"] == "the processor lacks it"


def test_a_gpu_is_examined_beside_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A doctor that looks at the CPU alone would call a broken GPU sound."""
    op = with_provider("same", NORM.reference)
    monkeypatch.setattr(diagnosis, "ALL_OPS", MappingProxyType({op.name: op}))
    asked: list[str] = []

    def check(
        op: Op, provider: Provider, *, seed: int, device: torch.device, expected: object
    ) -> CheckReport:
        del seed, expected
        asked.append(device.type)
        wrong = ("rms_norm by same: 7 is not 8",) if device.type == "cuda" else ()
        return CheckReport(op.name, provider.name, 1, wrong)

    monkeypatch.setattr(diagnosis, "check_provider", check)
    found = diagnose(make_gpu_platform())
    assert asked == ["cpu", "cuda"]
    assert not found.ok
    text = render_diagnosis(found)
    assert "operations on the GPU" in text
    assert "GPU          Test GPU, SM 90" in text
    assert "80.0 GiB" in text
    asked.clear()
    old = diagnose(make_gpu_platform(problem="the driver is too old"))
    assert asked == ["cpu"]
    text = render_diagnosis(old)
    assert "not served   the driver is too old" in text
    assert "no GPU" not in text
    none = diagnose(replace(make_gpu_platform(problem="install the driver"), gpu=None))
    assert "no GPU       install the driver" in render_diagnosis(none)


@pytest.mark.parametrize("variable", ["QUIRE_GPU_KERNELS", "QUIRE_CPU_ISA"])
def test_a_misspelt_wish_is_refused_on_either_device(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Turns red when a machine without the device takes any word for its kernels."""
    monkeypatch.setenv(variable, "tritn")
    with pytest.raises(ConfigError, match=f"{variable} .*'tritn'.* one of: .*none"):
        diagnose()


def test_forced_kernels_of_a_gpu() -> None:
    """`QUIRE_GPU_KERNELS=none` must leave out every kernel that may be at fault."""
    assert force_gpu_kernels(None) == {}
    assert set(force_gpu_kernels("none").values()) == {"reference"}
    forced = force_gpu_kernels("triton")
    assert forced["paged_attention"] == "triton"
    assert all(ALL_OPS[name].provider("triton") is not None for name in forced)


def test_it_says_at_once_what_takes_so_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when it looks as if it hung, or when a program reads more than JSON."""
    said: list[str] = []

    def examined(seed: int) -> diagnosis.Diagnosis:
        said.append(capsys.readouterr().err)
        return found

    found = examine(monkeypatch, with_provider("same", NORM.reference))
    monkeypatch.setattr(diagnosis, "diagnose", examined)
    assert main(["doctor"]) == 0
    assert main(["doctor", "--json"]) == 0
    assert "comparing every kernel" in said[0]
    assert said[1] == ""


@pytest.mark.parametrize(
    ("cxx", "words"),
    [
        ("none", "none: CXX=none leaves them out"),
        ("no-such-compiler", "none: no C++ compiler (no-such-compiler) on the path"),
        ("'", "none: CXX is"),
        ("{mine} --of-mine", "mine 9.1 --of-mine --version"),
        ("{mine}", "mine 9.1 --version"),
        ("{silent}", "{silent} --version fails (status 3)"),
    ],
)
def test_the_compiler_is_that_of_the_build(
    cxx: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: it named c++, whatever CXX said."""
    named = {"mine": str(tmp_path / "mine"), "silent": str(tmp_path / "silent")}
    for name, script in (("mine", 'echo "mine 9.1 $@"; echo more'), ("silent", "exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n".replace("\\\n", "\n"))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CXX", cxx.format(**named))
    found = examine(monkeypatch, with_provider("same", NORM.reference))
    assert f"compiler     {words.format(**named)}" in render_diagnosis(found)


@pytest.mark.parametrize(
    ("gpu", "build", "words"),
    [
        (False, TorchBuild("2.13.0+cpu", None, None), "for CPUs, 3.00 GiB installed"),
        (
            False,
            TorchBuild("2.13.0+cu128", (12, 8), None),
            "for CUDA 12.8, 3.00 GiB installed, of which 2.00 GiB serve GPUs alone; there is none "
            "here: builds for CPUs are at https://pytorch.org/get-started/locally/",
        ),
        (
            True,
            TorchBuild("2.13.0", (12, 8), None),
            "for CUDA 12.8, 3.00 GiB installed, of which 2.00 GiB serve GPUs alone",
        ),
        (True, TorchBuild("2.13.0", None, (6, 4)), "for ROCm 6.4, 3.00 GiB installed"),
    ],
)
def test_torch_is_named_with_what_it_costs(
    gpu: bool, build: TorchBuild, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (3 * 2**30, 2 * 2**30 if build.cuda else 0)
    monkeypatch.setattr(diagnosis, "find_torch_build", lambda: build)
    monkeypatch.setattr(diagnosis, "torch_sizes", lambda: size)
    op = with_provider("same", NORM.reference)
    monkeypatch.setattr(diagnosis, "ALL_OPS", MappingProxyType({op.name: op}))
    found = diagnose(replace(make_platform(), gpu=make_gpu_platform().gpu if gpu else None))
    lines = render_diagnosis(found).splitlines()
    assert f"torch build  {words}" in lines


def test_sizes_of_torch_are_those_of_the_installed_files(tmp_path: Path) -> None:
    for name, size in (("torch", 100), ("nvidia-cublas-cu12", 70), ("triton", 9), ("torchlike", 4)):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "RECORD").write_text(f"{name}/a.so,sha256=x,{size}\n{name}/RECORD,,\n")
    assert torch_sizes([str(tmp_path)]) == (179, 79)
    assert torch_sizes()[0] > 2**20
