"""Layers with states compute tokens again from kept inputs, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from quire.base.platform import detect_platform
from quire.compute.attention import StateInputs, StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.layers.recurrent import RecurrentLayers
from quire.compute.layers.recurrent.part import RecurrentPart
from quire.config.model_spec import DeltaHeads, SSDHeads
from quire.config.shard import Share
from quire.ops import OpSet, build_op_set, force_isa

BEST = build_op_set(detect_platform())
REFERENCE = build_op_set(detect_platform(), force_isa("none"))
NUM_ROWS, NUM_KEPT, DTYPE = 4, 24, torch.bfloat16
SIZE, DELTA = 24, DeltaHeads(2, 4, 12, 16)
NO_LIMITS, LIMITS = (0.0, float("inf")), (0.01, 0.5)

Make = Callable[[RecurrentLayers], RecurrentPart]


def ssd(num_groups: int, limits: tuple[float, float] = NO_LIMITS) -> Make:
    heads = SSDHeads(4, 16, num_groups, 12, limits)
    return lambda layers: layers.state_space(SIZE, heads, 4, 1e-5, bias=False, conv_bias=True).state


MAKERS: dict[str, Make] = {
    "gated convolution": lambda layers: layers.short_conv(SIZE, 3, bias=True),
    "convolution": lambda layers: layers.conv(Share.whole(96), 4),
    "convolution with a bias": lambda layers: layers.conv(Share.whole(96), 4, bias=True),
    "gated delta rule": lambda layers: layers.gated_delta(SIZE, DELTA, 4, 1e-5).rule,
    "selective state": ssd(2),
    "selective state of one group": ssd(1),
    "selective state with limits": ssd(2, LIMITS),
}


def made(make: Make, ops: OpSet) -> tuple[RecurrentLayers, RecurrentPart]:
    """Return a part with random weights, behind another one, and the layers of both."""
    layers = LayerFactory(ops, {}, DTYPE, torch.device("cpu"), max_positions=0).recurrent
    layers.conv(Share.whole(SIZE), 2)
    part = make(layers)
    generator = torch.Generator().manual_seed(0)
    for tensor in part._operation.weights:
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return layers, part


def step_of(counts: Sequence[int], rows: StateInputs) -> StepInputs:
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    kv: Any = None  # nobody attends
    return StepInputs(starts, starts[1:], max(counts), max(counts), (), kv, states=rows)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Tokens of each row, those of them that are computed again, and tokens before the step; a row
    with none to compute again has no drafts."""
    counts = draw(st.lists(st.integers(1, 6), min_size=NUM_ROWS, max_size=NUM_ROWS))
    again = [draw(st.integers(0, count)) for count in counts]
    return counts, again, [draw(st.integers(0, 2)) for _ in counts]


@pytest.mark.parametrize("ops", [BEST, REFERENCE], ids=["kernels", "reference"])
@pytest.mark.parametrize("name", MAKERS)
@examples(25)
@given(case=steps(), seed=st.integers(0, 9))
def test_a_replay_is_a_step_of_the_accepted_tokens(
    name: str, ops: OpSet, case: tuple[list[int], list[int], list[int]], seed: int
) -> None:
    """Would catch kept tokens of another row, a state that rejected drafts have changed, and bits
    that depend on the tokens that follow."""
    counts, again, before = case
    layers, part = made(MAKERS[name], ops)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn((sum(counts), width), generator=generator).to(DTYPE) for width in part._widths
    ]
    places = torch.full((3 * NUM_ROWS, layers.state_bytes), 0xFF, dtype=torch.uint8)
    states = part._own(places)  # NaN where nothing was written
    is_known = torch.tensor(before) > 0
    states[:NUM_ROWS][is_known] = torch.randn(
        (int(is_known.sum()), states.shape[1]), generator=generator
    ).to(states.dtype)
    kept = torch.full((NUM_KEPT, layers.kept_bytes), 0xFF, dtype=torch.uint8)
    firsts = torch.tensor([0, *counts]).cumsum(0)
    keep = torch.where(torch.tensor(again) > 0, firsts[:-1], -1)
    slots, computed = torch.arange(NUM_ROWS), torch.tensor(before)
    rows = StateInputs(places, slots, slots + NUM_ROWS, computed, slots, kept, keep)
    outputs = part.advance(inputs, step_of(counts, rows))
    if not any(again):
        return

    taken = [i for i in range(NUM_ROWS) if again[i]]
    index = torch.cat([torch.arange(again[i]) + int(firsts[i]) for i in taken])
    starts = torch.tensor([0, *(again[i] for i in taken)]).cumsum(0).int()
    numbers = torch.arange(len(taken))
    to = torch.tensor(taken) + 2 * NUM_ROWS
    part.replay(
        kept[index], StateInputs(places, slots[taken], to, computed[taken], numbers), starts
    )
    replayed = states[to].clone()

    plain = StateInputs(places, slots[taken], to, computed[taken], numbers)
    alone = part.advance([x[index] for x in inputs], step_of([again[i] for i in taken], plain))
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if ops is BEST else {}
    torch.testing.assert_close(replayed, states[to], **tolerance)
    torch.testing.assert_close(alone, outputs[index], **tolerance)
    assert torch.isfinite(replayed).all()
