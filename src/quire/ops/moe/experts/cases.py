"""Few and many tokens, with uneven loads and experts of other ranks, in plain and packed layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from quire.base.platform import detect_platform
from quire.ops.linear.int8 import OP as LINEAR_INT8
from quire.ops.linear.plain import OP as LINEAR
from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.operation import Case, Op
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]

EXPERTS, TOP_K = 6, 3
"""The first and the last expert are on other ranks."""


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`; arguments are x, ids, weights and the layers."""
    for dtype in DTYPES:
        for width, inner in ((32, 48), (37, 41)):
            layers = _layers(generator, width, inner, dtype)
            for tokens in (1, 5, 90):
                yield _case(f"{dtype}, {tokens} tokens", generator, tokens, width, dtype, *layers)
        layers = _quantized(generator, 64, 96)
        yield _case(f"{dtype}, 8 bits", generator, 11, 64, dtype, *layers)
    layers = _layers(generator, 32, 48, torch.float32)
    plain = _case("shared", generator, 19, 32, torch.float32, *layers)
    shared = {"shared": normal(generator, 19, 32)}
    yield Case(label="something shared", args=plain.args, kwargs=shared)
    gated = shared | {"shared_logits": normal(generator, 19, 1)}
    yield Case(label="something shared and gated", args=plain.args, kwargs=gated)


def _case(
    label: str,
    generator: torch.Generator,
    tokens: int,
    width: int,
    dtype: torch.dtype,
    gate_up: list[PackedMatrix],
    down: list[PackedMatrix],
) -> Case:
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    scores[:, 2] += 0.5
    weights, ids = scores.topk(TOP_K)
    x = normal(generator, tokens, width, dtype=dtype)
    return Case(label=label, args=(x, ids.to(torch.int32), weights, gate_up, down))


def _layers(
    generator: torch.Generator, width: int, inner: int, dtype: torch.dtype
) -> tuple[list[PackedMatrix], list[PackedMatrix]]:
    linear = _provided(LINEAR)
    gate_up, down = list[PackedMatrix](), list[PackedMatrix]()
    for _ in range(EXPERTS - 2):
        weight = normal(generator, 2 * inner, width, dtype=dtype) / width**0.5
        gate_up.append(linear(weight, None, gate="silu"))
        weight = normal(generator, width, inner, dtype=dtype) / inner**0.5
        down.append(linear(weight, normal(generator, width, dtype=dtype)))
    return gate_up, down


def _quantized(
    generator: torch.Generator, width: int, inner: int
) -> tuple[list[PackedMatrix], list[PackedMatrix]]:
    linear = _provided(LINEAR_INT8)

    def matrix(outputs: int, inputs: int, gate: str | None) -> PackedMatrix:
        values = torch.randint(-127, 128, (outputs, inputs), generator=generator)
        scale = torch.rand(outputs, generator=generator) / 64
        return linear(values.to(torch.int8), scale, None, gate=gate)

    gate_up = [matrix(2 * inner, width, "silu") for _ in range(EXPERTS - 2)]
    return gate_up, [matrix(width, inner, None) for _ in range(EXPERTS - 2)]


def _provided(op: Op) -> Callable[..., PackedMatrix]:
    """Return the best kernel for CPUs here, or the reference."""
    platform = detect_platform()
    for provider in op.providers:
        if provider.name.startswith("cpu_") and provider.unavailable(platform) is None:
            return provider.load()
    return op.reference
