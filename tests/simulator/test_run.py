"""The virtual clock, the executor behind its door, and whole simulated runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.base.errors import EngineError, RequestError
from quire.compute.runner.rows import RowTable
from quire.entrypoints.simulator import (
    Served,
    StepCost,
    SystemShape,
    build_core,
    device_named,
    serve,
)
from quire.entrypoints.simulator.executor import TOKEN
from quire.entrypoints.simulator.row_counts import ComputedRows, RowCounts
from quire.entrypoints.simulator.workloads import Piece, TraceRequest, draw_chat, engine_requests
from quire.plan.kv_cache import BlockHasher, KVManager
from quire.plan.scheduler import Scheduler
from quire.protocol import EngineRequest, SamplingParams
from quire.protocol.control import MeasureRecovery
from quire.protocol.step import StepPlan
from tests.profiles import seeds
from tests.simulator.systems import COST, crowded_system, crowded_trace, sharegpt, system

VOCAB = COST.spec.vocab_size


def seconds(*rows: tuple[int, int], sampled: int = 1) -> float:
    computed, tokens = np.array(rows, np.int64).T
    return COST.seconds(computed, tokens, sampled)


def run(trace: list[TraceRequest], num_tokens: int = 15_700, **changes: Any) -> Served:
    return serve(system(num_tokens, **changes), engine_requests(trace, VOCAB))


def test_a_run_takes_the_time_of_its_steps() -> None:
    """100 prompt tokens by chunks of 64, then 3 decodes; another request comes long after."""
    trace = [TraceRequest(10.0 * i, 100, 4) for i in range(2)]
    served = run(trace, max_num_batched_tokens=64, max_num_seqs=8)
    prefill = seconds((0, 64), sampled=0) + seconds((64, 36))
    decode = sum(seconds((100 + i, 1)) for i in range(3))
    assert served.first_token_s == pytest.approx([prefill, 10 + prefill])
    assert served.finished_s == pytest.approx([prefill + decode, 10 + prefill + decode])
    assert served.ttft_s == pytest.approx([prefill] * 2)
    assert served.tpot_s == pytest.approx([decode / 3] * 2)
    assert served.normalized_latency_s == pytest.approx((prefill + decode) / 4)
    assert (served.num_preempted, served.num_steps) == (0, 10)


def test_a_cpu_waits_for_its_own_host_when_rows_change() -> None:
    """One prompt of a step, then 3 decodes: the first changes its number of tokens. The step after
    the last one ends the row."""
    cost = StepCost(device_named("xeon-amx-2"), COST.spec)
    served = serve(
        build_core(cost, SystemShape(num_kv_blocks=100)),
        engine_requests([TraceRequest(0.0, 64, 4)], VOCAB),
    )
    rows = [(0, 64), (64, 1), (65, 1), (66, 1)]
    kernels = [cost.seconds(np.array([done]), np.array([tokens]), 1) for done, tokens in rows]
    changed = cost.host_s(0, changes_rows=True)
    entered = cost.host_s(1, changes_rows=True)
    assert served.first_token_s == pytest.approx([kernels[0] + entered])
    assert served.finished_s == pytest.approx([sum(kernels) + entered + changed])


def test_the_parts_are_the_real_ones() -> None:
    """Turns red when a stand-in takes the place of the scheduler or the block manager."""
    built = system()
    assert type(built.scheduler) is Scheduler
    assert type(built.scheduler.state.kv) is KVManager
    assert type(built.scheduler.state.prefixes._hasher) is BlockHasher


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    """Beams draw their candidates from the seed, arrivals and lengths theirs."""

    def trace_hash(seed: int, trace_seed: int) -> str:
        trace = sharegpt(2, 3, trace_seed, n=2, is_search=True)
        built = system(seed=seed)
        return serve(built, engine_requests(trace, VOCAB)).trace_hash

    first = trace_hash(1, 1)
    assert first == trace_hash(1, 1) != trace_hash(1, 2)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_a_full_pool_preempts_and_every_request_ends(mode: str) -> None:
    """Turns red when a request is lost or swaps never end."""
    trace = sharegpt(4, 12)
    served = run(trace, 3000, preemption_mode=mode, num_host_blocks=2000)
    assert served.num_preempted > 5
    assert (served.finished_s >= served.first_token_s).all()
    assert (served.first_token_s > served.arrival_s).all()


def test_swapping_is_slower_with_tiny_blocks() -> None:
    """Figure 19: calls of copies cost more than bytes. Turns red when swaps cost nothing."""
    latency = {
        size: run(
            sharegpt(4, 12), 3000, block_size=size, preemption_mode="swap",
            num_host_blocks=20_000 // size,
        ).normalized_latency_s
        for size in (1, 16)
    }  # fmt: skip
    assert latency[1] > 1.1 * latency[16]


def test_samples_and_beams_share_their_prompt() -> None:
    """Turns red when blocks of forks are not shared: the pool would hold fewer."""
    for is_search in (False, True):
        built = system()
        saved = entries = 0

        def look(built: object = built) -> None:
            nonlocal saved, entries
            stats = built.scheduler.stats()  # type: ignore[attr-defined]
            saved += stats.num_table_entries - stats.num_used_blocks
            entries += stats.num_table_entries

        trace = sharegpt(1, 10, n=4, is_search=is_search)
        served = serve(built, engine_requests(trace, VOCAB), look)
        assert np.isfinite(served.first_token_s).all()
        assert saved / entries > (0.3 if is_search else 0.05)


def test_later_turns_of_a_conversation_hit_the_cache() -> None:
    """Turns red when the content of a history is not that of the turns before."""
    trace = draw_chat(rate=1, seconds=60, seed=0, max_model_len=2048)
    built = system(100_000, enable_prefix_caching=True)
    serve(built, engine_requests(trace, VOCAB))
    stats = built.scheduler.stats()
    history = sum(r.prompt_tokens - r.pieces[-1].length for r in trace)
    assert history > 1000
    assert stats.cached_tokens_total == pytest.approx(history, rel=0.15)


def test_prompts_are_equal_where_their_pieces_are() -> None:
    first, second = engine_requests(
        [TraceRequest(0, 50, 1, (Piece(7, 20),)), TraceRequest(0, 60, 1, (Piece(7, 30),))], VOCAB
    )
    prompts = first.prompt_token_ids, second.prompt_token_ids
    assert (prompts[0][:20] == prompts[1][:20]).all()
    assert (prompts[0][20:] != prompts[1][20:50]).any()
    assert [len(prompt) for prompt in prompts] == [50, 60]
    assert max(map(max, prompts)) < VOCAB


def test_results_come_when_the_clock_says_so() -> None:
    """The door's futures: not done at first, a wait passes time, a short wait ends early."""
    built = system()
    built.core.add(EngineRequest("0", 0, np.arange(9, dtype=np.int32), SamplingParams(), 0))
    plan = built.scheduler.plan(0.0)
    assert plan is not None
    step = built.executor.execute(plan)
    assert not step.done()
    with pytest.raises(TimeoutError):
        step.result(1e-6)
    assert built.clock.now == pytest.approx(1e-6)
    assert step.exception() is None
    assert step.done()
    assert built.clock.now == pytest.approx(seconds((0, 9)))


def test_the_executor_measures_recovery_and_refuses_media() -> None:
    executor = system().executor
    costs = executor.control(MeasureRecovery()).recovery_costs
    assert costs is not None
    assert costs.seconds_per_token == COST.token_s
    with pytest.raises(RequestError, match="takes no media"):
        executor.put_media(0, b"")


def test_requests_out_of_order_are_refused() -> None:
    trace = [TraceRequest(1.0, 5, 2), TraceRequest(0.0, 5, 2)]
    with pytest.raises(EngineError, match="arrives at"):
        run(trace)


class BothRows(RowCounts):
    """The counts, beside the rows of the real runner, which must agree after every plan."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self.real = RowTable(max_num_seqs, 256, [16])
        self.num_compared = 0

    def compute(self, plan: StepPlan) -> ComputedRows:
        self.real.apply(plan)
        expected = self.real.scheduled()
        found = super().compute(plan)
        for name in ("slots", "num_computed", "num_tokens"):
            assert (getattr(found, name) == getattr(expected, name)).all(), name
        assert (found.drawing == expected.slots[expected.samples]).all()
        self.real.commit_computed(expected)
        self.num_compared += 1
        return found

    def fork(self, src: int, dst: int) -> None:
        super().fork(src, dst)
        self.real.fork(src, dst)

    def append(self, slots: np.ndarray) -> None:
        super().append(slots)
        self.real.append(slots, np.full(len(slots), TOKEN, np.int32))


@pytest.mark.parametrize("seed", seeds(1))
def test_invariants_hold_after_every_step(seed: int) -> None:
    """2,500 steps (50,000 when soaking) with a small pool, preemption, swaps, beams and forks. The
    counts of rows are those of the real runner's."""
    built = crowded_system(seed)
    rows = built.executor._rows = BothRows(16)
    requests = engine_requests(crowded_trace(seed), VOCAB)
    served = serve(built, requests, built.core.check_invariants)
    assert rows.num_compared == served.num_steps
    stats = built.scheduler.stats()
    assert served.num_steps >= 2500, "too few steps for what the name says"
    assert stats.preempted_total > 20
    assert stats.swapped_in_total > 5
    assert stats.num_used_blocks == stats.num_used_host_blocks == 0
