"""Matrix products for few rows, at the matrices of the models of the targets: bytes of the weight
per second, by the vendor's product, by each cut of ours, and by those that quantized weights have.

Copies of the weight that no cache holds take turns, as the layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.gpu.part import Part
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_LARGE, QWEN_SMALL, TINY, matrices
from quire.base.platform import Platform, detect_platform
from quire.compute.quantization import quantize_int4, quantize_int8
from quire.ops import ALL_OPS, PackedMatrix, select

__all__ = ["run"]

BEYOND_CACHE = 2**28
MODELS = {"Qwen3-0.6B": QWEN_SMALL, "Llama-3.1-8B": LLAMA_8B, "Qwen3-8B": QWEN_LARGE}
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)


def run(part: Part) -> None:
    """The matrix of a layer at a time."""
    models = {"tiny": TINY} if part.is_dry else MODELS
    platform = detect_platform(part.device.type)
    for model, config in models.items():
        for name, (outputs, depth) in matrices(config).items():
            if part.quick and name not in ("qkv", "down"):
                continue
            weight = torch.randn(outputs, depth, device=part.device).bfloat16() / depth**0.5
            for provider, pack, size in _providers(platform, weight):
                copies = 1 if part.is_dry else max(1, int(BEYOND_CACHE / size))
                packed = [pack() for _ in range(copies)]
                label = f"{model} {name} {outputs} x {depth} by {provider}"
                _measure(part, label, packed, size, depth)
                del packed


def _providers(
    platform: Platform, weight: torch.Tensor
) -> list[tuple[str, Callable[[], PackedMatrix], float]]:
    """Name, what packs the weight once more, and bytes of the packed weight."""
    found: list[tuple[str, Callable[[], PackedMatrix], float]] = []
    for provider in ALL_OPS["linear"].providers:
        if provider.unavailable(platform) is None:
            linear = provider.load()
            found.append((provider.name, lambda f=linear: f(weight.clone()), float(weight.nbytes)))
    for bits, quantize in ((8, quantize_int8), (4, quantize_int4)):
        op = ALL_OPS[f"linear_int{bits}"]
        name, linear = select(op, platform)
        parts = quantize(weight)
        call = partial(linear, *parts, dtype=weight.dtype)
        found.append((f"{name} in {bits} bits", call, weight.numel() * bits / 8))
    return found


def _measure(
    part: Part, label: str, packed: Sequence[PackedMatrix], size: float, depth: int
) -> None:
    for num_rows in (1, 3) if part.is_dry else ROWS[::3] if part.quick else ROWS:
        x = torch.randn(num_rows, depth, device=part.device).bfloat16()

        def run_all(x: torch.Tensor = x) -> None:
            for matrix in packed:
                matrix(x)

        try:
            seconds = part.seconds_of(run_all, 30)
        except Exception as error:  # noqa: BLE001  a kernel that does not run; the next one may
            part.check(f"{label}, {num_rows} rows", [f"{type(error).__name__}: {error}"])
            return
        part.rate(f"{label}, {num_rows} rows", "GB/s", size * len(packed), seconds)
