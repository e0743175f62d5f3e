"""The simulations of the benchmarks: what a step costs, and that the clock adds up."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.config.kv_layout import KVFormat, KVLayout
from quire.config.resolved import ResolvedScheduler
from quire.kv_cache import BlockHasher, KVManager
from quire.protocol import EngineRequest, SamplingParams
from quire.scheduler import Fcfs, Feasibility, Scheduler

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when one of them is run as a script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def cost() -> Any:
    model = importlib.import_module("cost_model")
    return model.StepCost(model.A100, model.LLAMA_13B)


def seconds(cost: Any, *rows: tuple[int, int]) -> float:
    """Of a step of rows (computed, tokens)."""
    computed, tokens = np.array(rows, np.int64).T
    return cost.seconds(computed, tokens)


def test_the_shape_has_the_cache_of_the_papers_table_1() -> None:
    """15.7 K slots in 12 GB. Turns red when K/V bytes are counted wrongly."""
    model = importlib.import_module("cost_model")
    assert 12e9 / model.LLAMA_13B.kv_bytes_per_token == pytest.approx(15_700, rel=0.1)


def test_few_tokens_cost_what_the_weights_take_to_read(cost: Any) -> None:
    """Turns red when a decode of one sequence and one of a few differ by more than their K/V."""
    one, four = seconds(cost, (100, 1)), seconds(cost, *[(100, 1)] * 4)
    assert four - one == pytest.approx(3 * 101 * cost.context_s)
    assert one == pytest.approx(cost.weights_s + 101 * cost.context_s)


def test_many_tokens_cost_their_products(cost: Any) -> None:
    """A prompt is bound by arithmetic, and its attention by pairs of tokens."""
    short, long = seconds(cost, (0, 1000)), seconds(cost, (0, 2000))
    assert long - short == pytest.approx(1000 * cost.token_s + 1_500_500 * cost.pair_s)


def test_chunks_of_a_prompt_have_the_pairs_of_the_whole(cost: Any) -> None:
    """Turns red when a chunk does not see what was computed before it."""
    whole = seconds(cost, (0, 2000)) - 2000 * cost.token_s
    chunks = sum(seconds(cost, (start, 500)) - 500 * cost.token_s for start in range(0, 2000, 500))
    assert chunks == pytest.approx(whole)


def make_scheduler() -> Scheduler:
    layout = KVLayout.of_windows([None], 16, KVFormat(1, 1, 1, 2))
    return Scheduler(
        kv=KVManager(layout, 100, 8, 512),
        hasher=BlockHasher(16, b"test"),
        policy=Fcfs(),
        feasibility=Feasibility(layout, 100, 8, 64, 512),
        settings=ResolvedScheduler(max_num_seqs=8, max_num_batched_tokens=64),
        max_model_len=512,
    )


def test_a_simulated_run_takes_the_time_of_its_steps(cost: Any) -> None:
    """100 prompt tokens by chunks of 64, then 3 decodes; another request comes long after."""
    simulation = importlib.import_module("simulation")
    prompts = np.arange(200, dtype=np.int32).reshape(2, 100)
    requests = [
        EngineRequest(str(i), i, prompt, SamplingParams(max_tokens=4), i, arrival_time=10.0 * i)
        for i, prompt in enumerate(prompts)
    ]
    device = simulation.SimulatedDevice(cost, 8, 512, 16)
    served = simulation.serve(make_scheduler(), device, requests)
    prefill = seconds(cost, (0, 64)) + seconds(cost, (64, 36))
    decode = sum(seconds(cost, (100 + i, 1)) for i in range(3))
    assert served.first_token_s == pytest.approx([prefill, 10 + prefill])
    assert served.finished_s == pytest.approx([prefill + decode, 10 + prefill + decode])
    assert served.num_preempted == 0
