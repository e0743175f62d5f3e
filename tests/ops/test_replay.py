"""What a list of recorded calls knows of the memory that its threads read next."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.ops import ALL_OPS, Team
from quire.ops.native import replay_function
from quire.ops.replay import KernelCall, ReplayList, streamed_next
from quire.platform import detect_platform

PLATFORM = detect_platform()
LAYERS = ("linear", "linear_int8", "linear_int4")
NOTHING = (0, 0)


def call(streams: tuple[int, int] = NOTHING) -> KernelCall:
    return KernelCall("avx2", "linear", 0, bytes(8), streams)


def provider_name() -> str:
    for provider in ALL_OPS["linear"].providers:
        if provider.name.startswith("cpu_") and provider.unavailable(PLATFORM) is None:
            return provider.name
    pytest.skip("no C++ kernels on this machine")


@given(st.lists(st.integers(0, 3), max_size=12))
def test_the_next_stream_is_that_of_a_later_call_or_of_the_first(sizes: list[int]) -> None:
    """Turns red when a call expects its own stream, one that is past, or none though there is one
    (a size of 0 stands for a call that streams nothing)."""
    calls = [call((100 + i, size) if size else NOTHING) for i, size in enumerate(sizes)]
    for i, found in enumerate(streamed_next(calls)):
        after = [later.streams for later in calls[i + 1 :] + calls[: i + 1] if later.streams[1]]
        assert found == (after[0] if after else NOTHING)


@pytest.mark.parametrize("name", LAYERS)
def test_a_linear_layer_streams_its_packed_weights(name: str) -> None:
    """Turns red when a layer names other memory, or a part of it: fetches would be for nothing."""
    chosen, team, (outputs, depth, group) = provider_name(), Team(1), (64, 128, 32)
    provider = next(p for p in ALL_OPS[name].providers if p.name == chosen)
    scale = torch.ones(outputs, dtype=torch.float32)
    weight = torch.ones(outputs, depth, dtype=torch.bfloat16)
    arguments: dict[str, tuple[torch.Tensor, ...]] = {
        "linear": (weight,),
        "linear_int8": (weight.to(torch.int8), scale),
        "linear_int4": (
            torch.full((outputs, depth), 7, dtype=torch.uint8),
            scale[:, None].repeat(1, depth // group),
        ),
    }
    layer = provider.load(team)(*arguments[name])
    with team.recording() as calls:
        layer(torch.ones(2, depth, dtype=torch.bfloat16))
    [(start, size)] = [recorded.streams for recorded in calls]
    [words] = [memoryview(recorded.arguments).cast("Q") for recorded in calls]
    assert start == words[2], "the packed weights are the kernel's third argument"
    bits = {"linear": 16, "linear_int8": 8, "linear_int4": 4 + 16 / group}
    assert size >= outputs * depth * bits[name] / 8


def test_threads_may_expect_memory_that_is_gone() -> None:
    """Turns red when a thread that waits reads what it should only ask for: the process would end
    here."""
    chosen, team = provider_name(), Team(4)
    provider = next(p for p in ALL_OPS["linear"].providers if p.name == chosen)
    generator = torch.Generator().manual_seed(0)
    layer = provider.load(team)(torch.randn(512, 256, generator=generator))
    x = torch.randn(3, 256, generator=generator)
    with team.recording() as calls:
        expected = layer(x)
    out = torch.frombuffer(bytearray(expected.numel() * 4), dtype=torch.float32)
    words = bytearray(calls[0].arguments)
    memoryview(words).cast("Q")[4] = out.data_ptr()
    gone = [replace(calls[0], arguments=bytes(words), streams=(1 << 12, 1 << 20))]
    replayed = ReplayList(replay_function(calls[0].isa), gone)
    for _ in range(200):
        out.zero_()
        replayed.run()
        assert torch.equal(out.view_as(expected), expected)
    time.sleep(0.001)  # members spin, and fetch, for a fifth of that
