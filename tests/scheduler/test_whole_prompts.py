"""Prompts of which each token sees all: a step computes one from its first token to its last."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.config.resolved import ResolvedScheduler
from quire.plan.kv_cache import BlockHasher, KVManager
from quire.plan.scheduler import Fcfs, Feasibility, Scheduler
from quire.protocol import EngineRequest
from quire.protocol.pooling_params import POOLED_PARAMS
from quire.protocol.step import StepResult
from tests.kv_cache.model import make_layout
from tests.profiles import examples

MOST = 24


def scheduler_of(num_blocks: int, num_seqs: int, step_tokens: int) -> Scheduler:
    layout = make_layout(((None, 1),), 4)
    settings = ResolvedScheduler(max_num_seqs=num_seqs, max_num_batched_tokens=step_tokens)
    return Scheduler(
        kv=KVManager(layout, num_blocks, num_seqs, MOST),
        hasher=BlockHasher(4, b"test"),
        policy=Fcfs(),
        feasibility=Feasibility(
            layout, num_blocks, num_seqs, step_tokens, MOST, draws_tokens=False
        ),
        settings=settings,
        max_model_len=MOST,
        enable_prefix_caching=False,
        whole_prompts=True,
    )


@examples(100)
@given(seed=st.integers(0, 2**32))
def test_no_prompt_is_cut(seed: int) -> None:
    """And all come to an end, in the order of their arrival."""
    rng = random.Random(seed)
    scheduler = scheduler_of(rng.randint(6, 30), rng.randint(1, 5), rng.randint(MOST, 40))
    lengths = [rng.randint(1, MOST) for _ in range(rng.randint(1, 12))]
    for handle, length in enumerate(lengths):
        prompt = np.arange(length, dtype=np.int32)
        request = EngineRequest(
            str(handle), handle, prompt, POOLED_PARAMS, 0, pooling=rng.choice(("last", "mean"))
        )
        scheduler.add(request)
    in_flight: list[tuple[int, list[int]]] = []
    slots: dict[int, int] = {}
    order: list[int] = []
    for _ in range(20 * len(lengths)):
        if in_flight and rng.random() < 0.5:
            step_id, done = in_flight.pop(0)
            vectors = {slot: np.zeros(2, np.float32) for slot in done}
            none = np.zeros(0, np.int32)
            scheduler.apply(StepResult(step_id, none, none, vectors=vectors))
            scheduler.check_invariants()
        plan = scheduler.plan(0.0) if len(in_flight) < 2 else None
        if plan is None:
            continue
        deltas = dict(zip(plan.delta_slot.tolist(), plan.delta_tokens.tolist(), strict=True))
        for row in plan.enter:
            assert row.num_computed_tokens == 0
            assert deltas[row.slot] == len(row.token_ids) == row.num_prompt_tokens
            slots[row.slot] = len(row.token_ids)
            order.append(len(row.token_ids))
        in_flight.append((plan.step_id, [row.slot for row in plan.enter]))
    assert order == lengths
    assert not scheduler.has_unfinished or in_flight
