"""Every provider that runs on the device, and the references there, against the references on the
CPU.

On a GPU each provider's cases are shared out to processes of their own, several at a time: most of
the time goes into compiling, and after a fault of the device a process computes nothing any more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from benchmarks.gpu.part import Part
from quire.base.platform import Platform, detect_platform
from quire.ops import ALL_OPS, REFERENCE, CheckReport, Op, Provider, check_provider

__all__ = ["run"]

_DRY_CASES = 40
_CASES_OF_A_PROCESS = 12
_SECONDS_OF_A_PROCESS = 240
_MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class _Job:
    """Cases first, first + step, … of an operation, by a provider."""

    op: str
    provider: str
    first: int
    step: int

    @property
    def label(self) -> str:
        return f"{self.op} by {self.provider}" + (f" ({self.first + 1})" if self.first else "")


def run(part: Part) -> None:
    """Providers that take part: all that are available, not the one that is chosen alone."""
    jobs = [job for op in ALL_OPS.values() for job in _jobs(part, op)]
    if part.is_dry:
        for job in jobs:
            _check(part, job)
        return
    count = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(partial(_check_apart, part), jobs))


def _jobs(part: Part, op: Op) -> list[_Job]:
    """List the jobs of all providers of an operation; a quick part leaves out some cases."""
    platform = detect_platform(part.device.type)
    names: list[str] = []
    for provider in op.providers:
        reason = provider.unavailable(platform)
        if reason is None:
            names.append(provider.name)
        elif not provider.name.startswith("cpu_"):
            print(f"{op.name} by {provider.name}: left out, {reason}")
    num_cases = sum(1 for _ in op.make_inputs(torch.Generator().manual_seed(part.seed)))
    if part.is_dry or part.quick:
        step, shares = max(1, num_cases // _DRY_CASES), 1
    else:
        step = shares = max(1, num_cases // _CASES_OF_A_PROCESS)
    jobs = [_Job(op.name, name, first, step) for name in names for first in range(shares)]
    return jobs if part.is_dry else [*jobs, _Job(op.name, REFERENCE, 0, 1)]


def _check_apart(part: Part, job: _Job) -> None:
    """In a process, which tells what it finds by itself unless it does not end well."""
    command = [sys.executable, "-m", "benchmarks.gpu.checks", str(part.findings), str(part.seed)]
    command += [job.op, job.provider, str(job.first), str(job.step)]
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    try:
        code = subprocess.run(
            command, env=environment, check=False, timeout=_SECONDS_OF_A_PROCESS
        ).returncode
    except subprocess.TimeoutExpired:
        part.check(job.label, [f"ended after {_SECONDS_OF_A_PROCESS} s"])
        return
    if code:
        part.check(job.label, [f"its process failed with {code}"])


def _check(part: Part, job: _Job) -> None:
    """A kernel that does not run at all is a failure."""
    op = ALL_OPS[job.op]
    provider = op.provider(job.provider)
    if provider is None:
        provider = Provider(REFERENCE, _always, partial(getattr, op, "reference"))
    make = op.make_inputs
    op = replace(
        op, make_inputs=lambda generator: islice(make(generator), job.first, None, job.step)
    )
    started = time.monotonic()
    try:
        report = check_provider(op, provider, seed=part.seed, device=part.device)
    except Exception as error:  # noqa: BLE001  whatever a compiler or a driver raises
        report = CheckReport(op.name, provider.name, 0, (f"{type(error).__name__}: {error}",))
    detail = f"{report.num_cases} cases in {time.monotonic() - started:.1f} s"
    part.check(job.label, report.failures, detail)


def _always(platform: Platform) -> None:
    """References run wherever torch does."""


def _main() -> None:
    """One job, on the GPU."""
    findings, seed, op, provider, first, step = sys.argv[1:]
    torch.set_num_threads(2)
    part = Part(torch.device("cuda"), quick=False, seed=int(seed), findings=Path(findings))
    with torch.inference_mode():
        _check(part, _Job(op, provider, int(first), int(step)))


if __name__ == "__main__":
    _main()
