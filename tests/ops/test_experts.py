"""Choice and sum of experts, in ways that no comparison of single calls shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.base.platform import detect_platform
from quire.config.model_spec import Routing
from quire.ops import ALL_OPS, REFERENCE, OpSet, PackedMatrix, Team, build_op_set
from quire.ops.linear.tables.cases import table_weight
from quire.ops.moe.experts import ExpertLayers
from quire.ops.moe.experts.reference import PlainExperts
from quire.ops.moe.route.reference import route

EXPERTS, TOP_K, WIDTH, INNER = 16, 4, 64, 96
OPS = build_op_set(detect_platform())
needs_kernels = pytest.mark.skipif(
    OPS.chosen["experts"] == REFERENCE, reason="no C++ kernels on this machine"
)


def layers_of(ops: OpSet, dtype: torch.dtype, *, seed: int = 0) -> ExpertLayers:
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int, gate: str | None) -> PackedMatrix:
        weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        return ops.gated_linear("linear", gate)(weight.to(dtype), None)

    gate_up = [matrix(2 * INNER, WIDTH, "silu") for _ in range(EXPERTS)]
    return ops.experts(gate_up, [matrix(WIDTH, INNER, None) for _ in range(EXPERTS)], dtype=dtype)


def inputs(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
    ids, weights = route(torch.randn(tokens, EXPERTS, generator=generator) * 2, ROUTING)
    ids[3::5] = ids[3]  # some experts have most of the rows
    return x, ids, weights


ROUTING = Routing(EXPERTS, TOP_K)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(threads: int, dtype: torch.dtype) -> None:
    """Turns red when the order of a sum follows the batch, or a task takes another's rows: with
    more threads than tasks these follow each other, with fewer each thread has its own."""
    layers = layers_of(build_op_set(detect_platform(), team=Team(threads)), dtype)
    x, ids, weights = inputs(700, dtype)
    whole = layers(x, ids, weights)
    assert torch.equal(whole, layers_of(OPS, dtype)(x, ids, weights)), "threads change bits"
    for token in (0, 3, 311, 699):
        own = slice(token, token + 1)
        assert torch.equal(layers(x[own], ids[own], weights[own]), whole[own])
    some = slice(100, 117)
    assert torch.equal(layers(x[some], ids[some], weights[some]), whole[some])


def test_a_token_takes_no_row_of_another() -> None:
    """Turns red when rows are put back in the wrong order: an expert's factor is its number."""
    identity = [OPS.linear(torch.eye(WIDTH) * (expert + 1)) for expert in range(EXPERTS)]
    halves = OPS.gated_linear("linear", "relu")
    gate_up = [halves(torch.cat([torch.eye(WIDTH)] * 2), None) for _ in range(EXPERTS)]
    layers = OPS.experts(gate_up, identity, dtype=torch.float32)
    x = torch.arange(1.0, 41.0)[:, None].expand(40, WIDTH).contiguous()
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(40)]).to(torch.int32)
    weights = torch.tensor([[2.0, 3.0]]).repeat(40, 1)
    factor = 2.0 * (ids[:, :1] + 1) + 3.0 * (ids[:, 1:] + 1)
    assert torch.equal(layers(x, ids, weights), x * x * factor)


def test_ranges_of_experts_add_up() -> None:
    """Turns red when an expert of another range adds something, such as a weight that is NaN."""
    generator = torch.Generator().manual_seed(0)
    gate_up = [torch.randn(2 * INNER, WIDTH, generator=generator) for _ in range(EXPERTS)]
    down = [torch.randn(WIDTH, INNER, generator=generator) for _ in range(EXPERTS)]
    gated = OPS.gated_linear("linear", "silu")

    def part(start: int, stop: int) -> ExpertLayers:
        outer = [gated(weight, None) for weight in gate_up[start:stop]]
        inner = [OPS.linear(weight) for weight in down[start:stop]]
        return OPS.experts(outer, inner, dtype=torch.float32, first=start)

    x, ids, weights = inputs(50, torch.float32)
    both = part(0, 5)(x, ids, weights) + part(5, EXPERTS)(x, ids, weights)
    torch.testing.assert_close(both, part(0, EXPERTS)(x, ids, weights), rtol=1e-5, atol=1e-3)
    elsewhere = torch.where(ids < 5, torch.nan, weights)
    assert torch.isfinite(part(5, EXPERTS)(x, ids, elsewhere)).all()


@pytest.mark.parametrize("implementation", [OPS.route, ALL_OPS["route"].reference])
def test_a_broken_row_leaves_the_others(
    implementation: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Turns red when NaN chooses an expert that there is not, or spoils another row."""
    logits = torch.randn(3, EXPERTS)
    expected = implementation(logits, ROUTING)
    logits = logits.clone()
    logits[1, 4] = torch.nan
    ids, weights = implementation(logits, ROUTING)
    assert weights[1].isnan().all()
    assert ids.min() >= 0
    assert ids.max() < EXPERTS
    assert torch.equal(weights[::2], expected[1][::2])
    assert torch.equal(ids[::2], expected[0][::2])


@needs_kernels
def test_experts_in_tables_are_multiplied_by_their_kernel() -> None:
    """Turns red when experts in FP8 run one after the other, or with the weights of another."""
    generator = torch.Generator().manual_seed(0)
    tables = OPS.gated_linear("linear_tables", "silu")
    outer = [table_weight(generator, 8, 2 * INNER, 1, WIDTH, own=False) for _ in range(EXPERTS)]
    inner = [table_weight(generator, 8, WIDTH, 1, INNER, own=False) for _ in range(EXPERTS)]
    layers = OPS.experts(
        [tables(weight, None) for weight in outer],
        [OPS.linear_tables(weight, None) for weight in inner],
        dtype=torch.float32,
    )
    assert not isinstance(layers, PlainExperts)
    plain = OPS.experts(
        [OPS.gated_linear("linear", "silu")(weight.numbers(), None) for weight in outer],
        [OPS.linear(weight.numbers()) for weight in inner],
        dtype=torch.float32,
    )
    given = inputs(200, torch.float32)
    for tokens in (1, 9, 200):
        some = [each[:tokens] for each in given]
        assert torch.equal(layers(*some), plain(*some)), tokens


@needs_kernels
def test_layers_of_other_providers_are_served() -> None:
    """Turns red when a layer that no kernel multiplies is taken for one."""
    gate_up = [OPS.gated_linear("linear", "silu")(torch.randn(2 * INNER, WIDTH), None)]
    down = [ALL_OPS["linear"].reference(torch.randn(WIDTH, INNER))]
    assert isinstance(OPS.experts(gate_up, down, dtype=torch.float32), PlainExperts)
