"""Drawing kernels: the reference's token for any row, filter and stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.waiting import WAIT_S

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Case, Team
from quire.ops.check import compare
from quire.ops.random_tensors import normal

OP = ALL_OPS["draw"]
PLATFORM = detect_platform()
TEAM = Team(2)


@st.composite
def filters(draw: st.DrawFn) -> tuple[float, int, float, float]:
    """temperature, top_k, top_p, min_p; an odd top_p, see quire/ops/sampling/draw/cases.py."""
    return (
        draw(st.sampled_from([0.0, 1e-6, 0.01, 0.5, 1.0, 3.0, 100.0, 1e30])),
        draw(st.sampled_from([0, 0, 1, 2, 5, 50, 10_000])),
        draw(st.one_of(st.just(1.0), st.integers(0, 998).map(lambda n: n / 1000 + 0.00037))),
        draw(st.sampled_from([0.0, 0.0, 0.037, 0.5, 1.0])),
    )


@examples(80)
@given(
    many=st.lists(filters(), min_size=1, max_size=6),
    vocab_size=st.one_of(st.integers(1, 200), st.sampled_from([4096, 33_000])),
    scale=st.sampled_from([0.0, 0.1, 1.0, 6.0, 60.0]),
    ties=st.booleans(),
    banned=st.integers(2, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    broken=st.sampled_from([0.0, 0.0, torch.nan, torch.inf, -torch.inf]),
    by_slot=st.booleans(),
    masked=st.sampled_from([0, 1, 2, 8]),
    seed=st.integers(0, 2**31),
)
def test_any_draw_equals_the_reference(
    many: list[tuple[float, int, float, float]],
    vocab_size: int,
    scale: float,
    ties: bool,
    banned: int,
    dtype: torch.dtype,
    broken: float,
    by_slot: bool,
    masked: int,
    seed: int,
) -> None:
    """Turns red when a token beyond a filter's end is drawn, a possible winner is passed over, a
    tail of the vocabulary is read wrongly, or a number that is none is overlooked. masked: number
    of tokens of which a mask allows one; 0: no mask."""
    generator = torch.Generator().manual_seed(seed)
    logits = normal(generator, 2, vocab_size) * scale
    if ties:
        logits = logits.round()
    logits[:, ::banned] = -torch.inf
    logits[:, seed % vocab_size] = 0.25
    if broken:
        logits[1, seed % vocab_size] = broken
    count = len(many)
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*many, strict=True)
    )
    case = Case(
        "random",
        (
            logits.to(dtype),
            torch.randint(2, (count,), generator=generator),
            temperature,
            top_k.long(),
            top_p,
            min_p,
            torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
            torch.randint(4, (count,), generator=generator),
            torch.randint(2**31, (count,), generator=generator),
            torch.randperm(count, generator=generator) if by_slot else None,
        ),
        some_masks(generator, count, vocab_size, masked) if masked else {},
    )
    for provider in OP.providers:
        if provider.unavailable(PLATFORM) is None:
            difference = compare(OP, provider.load(TEAM), case)
            assert difference is None, f"{provider.name}: {difference}"


def some_masks(
    generator: torch.Generator, count: int, vocab_size: int, part: int
) -> dict[str, torch.Tensor]:
    """Two masks that allow about one token in `part`, of which rows have one or none."""
    allowed = torch.randint(part, (2, -(-vocab_size // 32), 32), generator=generator) == 0
    words = (allowed.long() << torch.arange(32)).sum(2)
    rows = torch.randint(-1, 2, (count,), generator=generator)
    return {"masks": words.to(torch.int32), "mask_rows": rows}


@pytest.mark.parametrize("vocab_size", [1, 31, 64, 4100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_leaves_what_it_allows(vocab_size: int, temperature: float) -> None:
    """Turns red when a bit stands for another token, when a banned number that is none is
    overlooked, or when the model is blamed for a mask that leaves nothing."""
    zeros, off = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    arguments = (zeros, off + temperature, zeros, off + 1.0, off, zeros, zeros, zeros)
    for provider in OP.providers:
        if provider.unavailable(PLATFORM) is not None:
            continue
        call = provider.load(TEAM)
        for token in {0, vocab_size // 2, vocab_size - 1}:
            words = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int64)
            words[1, token // 32] = 1 << token % 32
            masks = {"masks": words.to(torch.int32), "mask_rows": zeros + 1}
            logits = torch.zeros(1, vocab_size)
            logits[0, token] = -200.0
            assert call(logits, *arguments, **masks).tolist() == [token], provider.name
            assert call(logits, *arguments, **{**masks, "mask_rows": zeros}).tolist() == [-2]
            logits[0, token] = -torch.inf
            assert call(logits, *arguments, **masks).tolist() == [-2 if vocab_size > 1 else -1]
            logits[0, 0] = torch.nan
            assert call(logits, *arguments, **masks).tolist() == [-1], provider.name
        with pytest.raises(EngineError, match="masks have"):
            call(logits, *arguments, masks=words[:, :0].to(torch.int32), mask_rows=zeros)


NO_MEMORY = """
import resource, torch
from quire.base.errors import EngineError
from quire.ops import ALL_OPS, Team
from quire.base.platform import detect_platform
here = detect_platform()
compiled = (p for p in ALL_OPS["draw"].providers if p.name.startswith("cpu_"))
provider = next(p for p in compiled if p.unavailable(here) is None)
calls, size = (provider.load(), provider.load(Team(2))), 8_000_000
number, integer = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
logits = torch.zeros(1, size)  # all in one bucket, whose ids take 64 MB and twice that as they grow
with open("/proc/self/status") as status:
    mapped = 1024 * int(next(line for line in status if line.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (mapped + 48 * 2**20,) * 2)
for call in calls:
    try:
        call(logits, integer, number, integer, number * 0.9, 0 * number, *[integer] * 3)
    except EngineError as error:
        assert "draw failed with code 2" in str(error), error
    else:
        raise SystemExit(4)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads sizes through /proc")
@pytest.mark.skipif(
    all(
        provider.unavailable(PLATFORM)
        for provider in OP.providers
        if provider.name.startswith("cpu_")
    ),
    reason="no compiled kernels",
)
def test_a_draw_without_memory_fails_alone() -> None:
    """Turns red when a process ends because a thread of the team finds no memory."""
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], timeout=WAIT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("vocab_size", [1, 15, 4100])
def test_a_number_that_is_none_is_found_wherever_it_stands(vocab_size: int) -> None:
    """Turns red when part of a row is not looked at: at the end of a vector, a piece, the row."""
    zeros, noise = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    arguments = (zeros, noise, zeros, noise + 1.0, noise, zeros, zeros, zeros)
    for provider in OP.providers:
        if provider.unavailable(PLATFORM) is not None:
            continue
        call = provider.load(TEAM)
        for token in {0, vocab_size // 2, vocab_size - 1}:
            logits = torch.full((1, vocab_size), -3.0)
            logits[0, token] = torch.nan
            assert call(logits, *arguments).tolist() == [-1], provider.name
            logits[0, token] = -2.0
            assert call(logits, *arguments).tolist() == [token], provider.name
