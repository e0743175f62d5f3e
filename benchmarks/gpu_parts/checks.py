"""Every provider that runs on the device, and the references there, against the references on the
CPU."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from gpu_parts.part import Part
from quire.ops import ALL_OPS, REFERENCE, CheckReport, Op, Provider, check_provider
from quire.platform import Platform, detect_platform

__all__ = ["run"]

_DRY_CASES = 40


def run(part: Part) -> None:
    """Providers that take part: all that are available, not the one that is chosen alone."""
    platform = detect_platform(part.device.type)
    for op in ALL_OPS.values():
        for provider in op.providers:
            if (reason := provider.unavailable(platform)) is not None:
                if not provider.name.startswith("cpu_"):
                    print(f"{op.name} by {provider.name}: left out, {reason}")
                continue
            _check(part, op, provider)
        if not part.is_dry:
            _check(part, op, Provider(REFERENCE, _always, partial(getattr, op, "reference")))


def _always(platform: Platform) -> None:
    """References run wherever torch does."""


def _check(part: Part, op: Op, provider: Provider) -> None:
    """A kernel that does not run at all is a failure, and the next one is checked."""
    if part.is_dry or part.quick:
        make = op.make_inputs
        generator = torch.Generator().manual_seed(part.seed)
        step = max(1, sum(1 for _ in make(generator)) // _DRY_CASES)
        op = replace(op, make_inputs=lambda generator: islice(make(generator), 0, None, step))
    started = time.monotonic()
    try:
        report = check_provider(op, provider, seed=part.seed, device=part.device)
    except Exception as error:  # noqa: BLE001  whatever a compiler or a driver raises
        report = CheckReport(op.name, provider.name, 0, (f"{type(error).__name__}: {error}",))
    detail = f"{report.num_cases} cases in {time.monotonic() - started:.1f} s"
    part.check(f"{op.name} by {provider.name}", report.failures, detail)
