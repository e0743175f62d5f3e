"""The doctor finds a kernel that computes something else."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from quire.bench import diagnosis
from quire.bench.diagnosis import diagnose, render_diagnosis
from quire.cli.main import main
from quire.errors import ConfigError
from quire.ops import ALL_OPS, CheckReport, Op, Provider, force_gpu_kernels
from tests.config.specs import make_gpu_platform

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
