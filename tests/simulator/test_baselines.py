"""Orca and FasterTransformer: their memory, and their time."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.paper.baselines import (
    RESERVATIONS,
    BuddyAllocator,
    OrcaMemory,
    serve_faster_transformer,
    serve_orca,
)
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import ConfigError
from quire.entrypoints.simulator import Served, serve
from quire.entrypoints.simulator.workloads import TraceRequest, engine_requests
from tests.simulator.systems import CONTIGUOUS, sharegpt, system


def orca(
    trace: list[TraceRequest],
    version: str = "oracle",
    num_slots: int = 15_700,
    memory: OrcaMemory | None = None,
) -> Served:
    return serve_orca(
        trace, CONTIGUOUS, RESERVATIONS[version], num_slots=num_slots, max_num_seqs=256,
        max_num_batched_tokens=2560, memory=memory,
    )  # fmt: skip


@given(
    num_slots=st.integers(1, 300),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 70)), max_size=40),
)
def test_pieces_never_overlap_and_all_come_back(
    num_slots: int, steps: list[tuple[bool, int]]
) -> None:
    """Turns red when two requests of the baseline share slots, or memory leaks."""
    memory = BuddyAllocator(num_slots)
    before = [set(starts) for starts in memory._free]
    held: list[tuple[int, int]] = []
    for releases, size in steps:
        if releases and held:
            memory.release(*held.pop(size % len(held)))
        elif (piece := memory.allocate(size)) is not None:
            assert size <= 1 << piece[1] < 2 * size
            held.append(piece)
        slots = [slot for start, order in held for slot in range(start, start + (1 << order))]
        assert len(set(slots)) == len(slots) <= num_slots
        assert all(0 <= slot < num_slots for slot in slots)
        assert memory.num_free == num_slots - len(slots)
    for piece in held:
        memory.release(*piece)
    assert memory._free == before


@pytest.mark.parametrize(("version", "slots"), [("oracle", 125), ("pow2", 132), ("max", 2048)])
def test_versions_reserve_what_the_paper_says(version: str, slots: int) -> None:
    """Its example: a true output of 25 reserves 32 positions under Pow2."""
    assert RESERVATIONS[version](100, 25) == slots


def test_orca_reserves_powers_of_two_for_prompt_and_output() -> None:
    """100 + 40 tokens take 256 slots: two at once in 600. Turns red when it packs like we do."""
    served = orca([TraceRequest(0.0, 100, 40)] * 3, num_slots=600)
    both = CONTIGUOUS.seconds(np.zeros(2, np.int64), np.full(2, 100), 2)
    assert served.first_token_s[:2] == pytest.approx([both] * 2)
    assert served.finished_s[0] == served.finished_s[1] < served.first_token_s[2]
    assert 1 < served.mean_running < 2


def test_memory_is_accounted_for_in_full() -> None:
    """Two of 100 + 40 in 600 slots while a third waits: 512 slots are owned, 88 free; 280 are
    needed. Turns red when a part is counted twice."""
    memory = OrcaMemory()
    orca([TraceRequest(0.0, 100, 40)] * 3, num_slots=600, memory=memory)
    shares = memory.shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["internal"] == pytest.approx((512 - 278) / 600, abs=0.005)
    assert shares["free"] == pytest.approx(88 / 600)


def test_several_sequences_of_a_request_share_nothing() -> None:
    """Turns red when three samples take less memory than three requests."""
    one = orca([TraceRequest(0.0, 100, 40, n=3)], num_slots=1024)
    assert one.mean_running == pytest.approx(3, abs=0.1)
    with pytest.raises(ConfigError, match="never fits"):
        orca([TraceRequest(0.0, 100, 40, n=3)], num_slots=600)


def test_the_better_the_knowledge_the_lower_the_latency() -> None:
    """The order of figure 12 in the saturated region, ours first."""
    trace = sharegpt(2.0, 60)
    latencies = [
        serve(system(), engine_requests(trace, CONTIGUOUS.spec.vocab_size)).normalized_latency_s,
        *(orca(trace, version).normalized_latency_s for version in ("oracle", "pow2", "max")),
        serve_faster_transformer(trace, CONTIGUOUS, num_slots=15_700).normalized_latency_s,
    ]
    assert latencies == sorted(latencies)


def test_a_static_batch_ends_with_its_longest_request() -> None:
    """A later request waits for all of the first batch, and the short request there ends with the
    long one. Turns red when it batches by iteration."""
    trace = [TraceRequest(0.0, 50, 5), TraceRequest(0.0, 50, 60), TraceRequest(0.1, 50, 5)]
    served = serve_faster_transformer(trace, CONTIGUOUS, num_slots=15_700)
    assert served.finished_s[0] == served.finished_s[1] < served.first_token_s[2]
    with pytest.raises(ConfigError, match="hold no request"):
        serve_faster_transformer(trace, CONTIGUOUS, num_slots=2000)
