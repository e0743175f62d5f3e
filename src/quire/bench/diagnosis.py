"""What `quire doctor` finds: the machine, its kernels, and whether they are right."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.machine import Machine, describe_machine
from quire.config import env
from quire.ops import ALL_OPS, Op, build_op_set, check_provider, force_isa
from quire.ops.compile import ISAS
from quire.ops.native import native_unavailable
from quire.platform import Platform, detect_platform

__all__ = ["Diagnosis", "OpDiagnosis", "ProviderDiagnosis", "diagnose", "render_diagnosis"]

COMPILERS = ("c++", "g++", "clang++")
MAX_FAILURES = 3
"""Sentences shown per provider; the JSON has them all."""


@dataclass(frozen=True, slots=True)
class ProviderDiagnosis:
    """unavailable: why it cannot run here, or None. failures: cases that disagree, a sentence
    each, or the error that ended the comparison."""

    name: str
    unavailable: str | None
    num_cases: int
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpDiagnosis:
    """chosen: the provider that an engine would use here."""

    name: str
    chosen: str
    providers: tuple[ProviderDiagnosis, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """compiler: its first line of --version, or None. kernels: by instruction set, None if they
    are loaded, else why not."""

    machine: Machine
    compiler: str | None
    kernels: dict[str, str | None]
    ops: tuple[OpDiagnosis, ...]

    @property
    def ok(self) -> bool:
        """Whether every provider that runs here agrees with its reference."""
        return not any(provider.failures for op in self.ops for provider in op.providers)

    def as_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return {"ok": self.ok, **asdict(self)}


def diagnose(platform: Platform | None = None, seed: int = 0) -> Diagnosis:
    """Compare every provider that this machine has with its reference."""
    platform = platform or detect_platform()
    chosen = build_op_set(platform, force_isa(env.cpu_isa())).chosen
    return Diagnosis(
        machine=describe_machine(platform),
        compiler=_find_compiler(),
        kernels={isa.name: native_unavailable(isa.name, platform) for isa in ISAS},
        ops=tuple(_diagnose_op(op, chosen[name], platform, seed) for name, op in ALL_OPS.items()),
    )


def render_diagnosis(found: Diagnosis) -> str:
    """A page of text; the last line is the verdict."""
    lines = [*found.machine.lines(), f"compiler     {found.compiler or 'none'}"]
    for isa, reason in found.kernels.items():
        lines.append(f"kernels      {isa}: {reason or 'loaded'}")
    width = max(len(op.name) for op in found.ops)
    lines.append("operations")
    for op in found.ops:
        lines.append(f"  {op.name:<{width}}  {op.chosen}{_verdicts(op)}")
        for provider in op.providers:
            lines += [f"    wrong: {text}" for text in provider.failures[:MAX_FAILURES]]
    compared = [p for op in found.ops for p in op.providers if p.unavailable is None]
    wrong = sum(bool(provider.failures) for provider in compared)
    lines.append(
        f"{wrong} of {len(compared)} kernels disagree with their reference: set QUIRE_CPU_ISA=none "
        "to run without them, and report this"
        if wrong
        else f"all {len(compared)} kernels agree with their references"
    )
    return "\n".join(lines)


def _verdicts(op: OpDiagnosis) -> str:
    """What there is to say about the providers beside which one is chosen."""
    parts = [
        f"{provider.name} {'DISAGREES' if provider.failures else 'agrees'} in "
        f"{provider.num_cases} cases"
        for provider in op.providers
        if provider.unavailable is None
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _diagnose_op(op: Op, chosen: str, platform: Platform, seed: int) -> OpDiagnosis:
    found: list[ProviderDiagnosis] = []
    for provider in op.providers:
        reason = provider.unavailable(platform)
        if reason is not None:
            found.append(ProviderDiagnosis(provider.name, reason, 0, ()))
            continue
        try:
            report = check_provider(op, provider, seed=seed)
        except Exception as error:  # noqa: BLE001  a diagnosis goes on to the next kernel
            failure = f"{op.name} by {provider.name} raised {type(error).__name__}: {error}"
            found.append(ProviderDiagnosis(provider.name, None, 0, (failure,)))
        else:
            found.append(ProviderDiagnosis(provider.name, None, report.num_cases, report.failures))
    return OpDiagnosis(op.name, chosen, tuple(found))


def _find_compiler() -> str | None:
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            answer = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=False
            )
            return next(iter(answer.stdout.splitlines()), path)
    return None
