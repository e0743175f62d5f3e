"""The benchmarks of shared prefixes: the baseline's memory, and what sharing changes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.llm import LLM
from quire.protocol import EngineRequest, SamplingParams

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True, scope="module")
def benchmarks_on_path() -> Any:
    """As when one of them is run as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@given(
    num_slots=st.integers(1, 300),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 70)), max_size=40),
)
def test_pieces_never_overlap_and_all_come_back(
    num_slots: int, steps: list[tuple[bool, int]]
) -> None:
    """Turns red when two requests of the baseline share slots, or memory leaks."""
    memory = importlib.import_module("orca").BuddyAllocator(num_slots)
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


def test_the_baseline_reserves_powers_of_two_for_prompt_and_output() -> None:
    """100 + 40 tokens take 256 slots: two at once in 600. Turns red when it packs like we do."""
    orca = importlib.import_module("orca")
    costs = importlib.import_module("cost_model")
    cost = costs.StepCost(costs.A100, costs.LLAMA_13B)
    prompts = np.arange(300, dtype=np.int32).reshape(3, 100)
    requests = [
        EngineRequest(str(i), i, prompt, SamplingParams(max_tokens=40), i)
        for i, prompt in enumerate(prompts)
    ]
    served = orca.serve_orca(
        requests, cost, num_slots=600, max_num_seqs=8, max_num_batched_tokens=512
    )
    pair = np.array([[0, 0], [100, 100]], np.int64)
    assert served.first_token_s[:2] == pytest.approx([cost.seconds(*pair)] * 2)
    assert served.finished_s[0] == served.finished_s[1] < served.first_token_s[2]
    assert 1 < served.mean_running < 2


def test_a_shared_prefix_lets_more_requests_run_at_once() -> None:
    """Turns red when the simulated cache or pin is not hit."""
    simulated = importlib.import_module("shared_prefix_simulated")
    translation = importlib.import_module("translation")
    work = translation.draw_translations(300, 32000, seed=1)
    prefix = translation.make_prefix(341, 32000)
    assert len(work.prompts(prefix)[0]) == 341 + len(work.sentences[0])
    rates: dict[str, float] = {}
    for system in simulated.SYSTEMS:
        requests, served = simulated.simulate(system, work, prefix, [0.0] * 300)
        rates[system] = simulated.saturated_rate(served)
        assert simulated.normalized_latency(requests, served) > 0
        assert min(served.first_token_s) > 0
    assert rates["pinned"] > rates["cached"] > 2 * rates["off"]
    assert rates["off"] > rates["orca"]


def test_the_engines_run_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a system of the measured part cannot be opened, or nothing is shared."""
    measured = importlib.import_module("shared_prefix")
    monkeypatch.setattr(measured, "PREFIX_TOKENS", (80,))
    engines: dict[str, LLM] = {system: measured.open_engine(system) for system in measured.SYSTEMS}
    try:
        figures = measured.measure(engines, count=4, repeats=1)
        cached = {
            system: llm.engine.client.stats().cached_tokens_total for system, llm in engines.items()
        }
    finally:
        for llm in engines.values():
            llm.shutdown()
    assert figures["80.off.times_off"].median == 1.0
    assert figures["80.pinned.requests_per_s"].median > 0
    assert cached["off"] == 0
    assert cached["cached"] == 7 * 80  # all but the first of eight
    assert cached["pinned"] == 8 * 80
