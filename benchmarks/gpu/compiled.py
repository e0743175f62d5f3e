"""Norms, activations and sums by torch's compiler, beside our own kernels: bytes read
and written per second, at the widths of the models of the targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.part import Part
from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, select
from quire.ops.compiled import compiled_provider

__all__ = ["run"]

ROWS = (1, 32, 256, 4096)
WIDTHS = (1024, 4096)


def run(part: Part) -> None:
    """Ours, then the compiled one, for each number of rows."""
    rows_to_try, widths = ((1, 3), (64,)) if part.is_dry else (ROWS, WIDTHS)
    platform = detect_platform(part.device.type)
    for name in ("add_rms_norm", "activation_and_mul"):
        op = ALL_OPS[name]
        ours, own = select(op, platform)
        for provider, call in ((ours, own), ("compiled", compiled_provider(op).load())):
            for width in widths:
                for num_rows in rows_to_try:
                    arguments, num_bytes = _arguments(part, name, num_rows, width)
                    label = f"{name} by {provider}, {num_rows} x {width}"
                    _measure(part, label, partial(call, *arguments), num_bytes)


def _arguments(part: Part, name: str, num_rows: int, width: int) -> tuple[tuple[Any, ...], int]:
    """Arguments of one call, and bytes that it reads and writes."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=part.device).bfloat16()

    if name == "add_rms_norm":
        x, residual = random(num_rows, width), random(num_rows, width)
        return (x, residual, random(width), 1e-6), 4 * x.nbytes
    x = random(num_rows, 6 * width)
    return (x, "silu"), x.nbytes * 3 // 2


def _measure(part: Part, label: str, call: Callable[[], object], num_bytes: int) -> None:
    try:
        call()  # compiles
        seconds = part.seconds_of(call, 30)
    except Exception as error:  # noqa: BLE001  a kernel that does not run; the next one may
        part.check(label, [f"{type(error).__name__}: {error}"])
        return
    part.rate(label, "GB/s", float(num_bytes), seconds)
