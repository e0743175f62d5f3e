"""The findings of `quire doctor`: the machine, its kernels, and whether they are right."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from quire.base.platform import Platform, detect_platform
from quire.base.platform.torch_build import find_torch_build, torch_sizes
from quire.config import env
from quire.config.memory.amounts import format_bytes
from quire.config.resolve import Decision
from quire.config.settings import EngineSettings
from quire.engine.kernel_choice import choose_kernels
from quire.entrypoints.bench.machine import Machine, describe_machine
from quire.ops import ALL_OPS, Op, build_op_set, check_provider, force_gpu_kernels, force_isa
from quire.ops.check import Outcomes, reference_outcomes
from quire.ops.compile import ISAS, CompileError, find_compiler
from quire.ops.native.binding import native_unavailable

__all__ = ["Diagnosis", "OpDiagnosis", "ProviderDiagnosis", "diagnose", "render_diagnosis"]

TORCH_PAGE = "https://pytorch.org/get-started/locally/"
_OPERATIONS = {"linear_isa": "linear", "attention_isa": "paged_attention"}
_DEVICE_NAMES = {"cpu": "the CPU", "cuda": "the GPU"}
MAX_FAILURES = 3
"""Sentences shown per provider; the JSON has them all."""


@dataclass(frozen=True, slots=True)
class ProviderDiagnosis:
    """unavailable: reason why it cannot run here, or None. failures: cases that disagree, a
    sentence each, or the error that ended the comparison."""

    name: str
    unavailable: str | None
    num_cases: int
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpDiagnosis:
    """device: device of the examination. chosen: the provider that an engine would use here."""

    name: str
    device: str
    chosen: str
    providers: tuple[ProviderDiagnosis, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """gpu_problem: reason why no engine can compute on a GPU, and what to do; None if one can.
    compiler: first line of its --version, or the reason why there is none. torch_build: devices it
    was made for, and its size. kernels: reason why an instruction set's kernels are not loaded,
    None if they are. products: kernels that an engine would choose for products of 16
    bits, and why."""

    machine: Machine
    gpu_problem: str | None
    compiler: str
    torch_build: str
    kernels: dict[str, str | None]
    products: tuple[Decision, ...]
    ops: tuple[OpDiagnosis, ...]

    @property
    def ok(self) -> bool:
        """True if every provider that runs here agrees with its reference."""
        return not any(provider.failures for op in self.ops for provider in op.providers)

    def as_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return {"ok": self.ok, **asdict(self)}


def diagnose(platform: Platform | None = None, seed: int = 0) -> Diagnosis:
    """Compare every provider that this machine has with its reference, on its CPU and its GPU.

    Raises ConfigError if a variable of the environment names kernels that do not exist.
    """
    env.check_kernels()
    platform = platform or detect_platform()
    products = choose_kernels(EngineSettings(device="cpu"), platform).decisions
    return Diagnosis(
        machine=describe_machine(platform),
        gpu_problem=platform.gpu_problem,
        compiler=_describe_compiler(),
        torch_build=_describe_torch(platform.gpu is not None),
        kernels={isa.name: native_unavailable(isa.name, platform) for isa in ISAS},
        products=products,
        ops=tuple(
            each for on in _devices(platform) for each in _diagnose_device(on, products, seed)
        ),
    )


def _devices(platform: Platform) -> Iterator[Platform]:
    yield replace(platform, device="cpu")
    if platform.gpu is not None and platform.gpu_problem is None:
        yield replace(platform, device="cuda")


def render_diagnosis(found: Diagnosis) -> str:
    """A page of text; the last line is the verdict."""
    lines = found.machine.lines()
    if found.gpu_problem is not None:
        # A GPU that is there is named by the machine's own lines.
        label = "no GPU" if found.machine.gpu == "none" else "not served"
        lines.append(f"{label:<13}{found.gpu_problem}")
    lines.append(f"torch build  {found.torch_build}")
    lines.append(f"compiler     {found.compiler}")
    for isa, reason in found.kernels.items():
        lines.append(f"kernels      {isa}: {reason or 'loaded'}")
    lines += [f"{each.name:<13} {each.value}: {each.reason}" for each in found.products]
    width = max(len(op.name) for op in found.ops)
    device = None
    for op in found.ops:
        if op.device != device:
            device = op.device
            lines.append(f"operations on {_DEVICE_NAMES[device]}")
        lines.append(f"  {op.name:<{width}}  {op.chosen}{_verdicts(op)}")
        for provider in op.providers:
            lines += [f"    wrong: {text}" for text in provider.failures[:MAX_FAILURES]]
    compared = [p for op in found.ops for p in op.providers if p.unavailable is None]
    wrong = sum(bool(provider.failures) for provider in compared)
    lines.append(
        f"{wrong} of {len(compared)} kernels disagree with their reference: set QUIRE_CPU_ISA=none "
        "(on a GPU QUIRE_GPU_KERNELS=none) to run without them, and report this"
        if wrong
        else f"all {len(compared)} kernels agree with their references"
    )
    return "\n".join(lines)


def _verdicts(op: OpDiagnosis) -> str:
    """Describe the providers other than the chosen one."""
    parts = [
        f"{provider.name} {'DISAGREES' if provider.failures else 'agrees'} in "
        f"{provider.num_cases} cases"
        for provider in op.providers
        if provider.unavailable is None
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _diagnose_device(
    platform: Platform, products: Sequence[Decision], seed: int
) -> Iterator[OpDiagnosis]:
    """Every operation on the platform's device. products: chosen for CPUs."""
    on_cpu = platform.device == "cpu"
    forced = force_gpu_kernels(env.gpu_kernels())
    if on_cpu:
        chosen_isas = {_OPERATIONS[each.name]: f"cpu_{each.value}" for each in products}
        forced = {**force_isa(env.cpu_isa()), **chosen_isas}
    chosen = build_op_set(platform, forced).chosen
    for name, op in ALL_OPS.items():
        yield _diagnose_op(op, chosen[name], platform, seed)


def _diagnose_op(op: Op, chosen: str, platform: Platform, seed: int) -> OpDiagnosis:
    device = torch.device(platform.device)
    found: list[ProviderDiagnosis] = []
    expected: Outcomes | None = None
    for provider in op.providers:
        reason = provider.unavailable(platform)
        if reason is not None:
            found.append(ProviderDiagnosis(provider.name, reason, 0, ()))
            continue
        try:
            expected = reference_outcomes(op, seed=seed) if expected is None else expected
            report = check_provider(op, provider, seed=seed, device=device, expected=expected)
        except Exception as error:  # noqa: BLE001  a diagnosis goes on to the next kernel
            failure = f"{op.name} by {provider.name} raised {type(error).__name__}: {error}"
            found.append(ProviderDiagnosis(provider.name, None, 0, (failure,)))
        else:
            found.append(ProviderDiagnosis(provider.name, None, report.num_cases, report.failures))
    return OpDiagnosis(op.name, platform.device, chosen, tuple(found))


def _describe_compiler() -> str:
    """Return the first line that the compiler of a build says of itself, or why there is none."""
    try:
        command = [*find_compiler(), "--version"]
    except CompileError as error:
        return f"none: {error}"
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{' '.join(command)} fails ({error.strerror})"
    if answer.returncode:
        return f"{' '.join(command)} fails (status {answer.returncode})"
    return next(iter(answer.stdout.splitlines()), command[0])


def _describe_torch(has_gpu: bool) -> str:
    """Return for which devices torch was built, and what it takes on the disk."""
    build, (total, of_gpus) = find_torch_build(), torch_sizes()
    what, version = "CPUs", build.cuda or build.hip
    if version is not None:
        what = f"{'CUDA' if build.cuda else 'ROCm'} {version[0]}.{version[1]}"
    text = f"for {what}, {format_bytes(total)} installed"
    if version is None or not of_gpus:
        return text
    text += f", of which {format_bytes(of_gpus)} serve GPUs alone"
    if has_gpu:
        return text
    return f"{text}; there is none here: builds for CPUs are at {TORCH_PAGE}"
