"""Measures, once at start, what it costs to bring a preempted request back."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from quire.config.kv_layout import KVLayout
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import EnterRow, IntArray, StepPlan, StepResult

__all__ = ["measure_recovery"]

NUM_TOKENS = 128
"""Tokens of the prompt that is computed: enough rows for the matrix kernels to be at their
speed."""

NUM_BLOCKS = 64
REPEATS = 2
"""The first one touches memory and starts threads; the best counts."""

COPIES = 8
"""Repeats of the copies, which are so short that one beside which another process got the processor
says nothing. On a busy machine two may both be of that kind."""


def measure_recovery(
    execute: Callable[[StepPlan], StepResult],
    copy_out: Callable[[IntArray, IntArray], None],
    *,
    layout: KVLayout,
    num_blocks: int,
    num_host_blocks: int,
    longest_step: int,
) -> RecoveryCosts:
    """Time a prompt and copies of blocks, on an engine that serves nobody yet.

    longest_step: tokens that one step and one sequence may have at most.
    """
    count = min(NUM_BLOCKS, num_blocks, num_host_blocks)
    blocks = np.arange(count, dtype=np.int32)
    copying = min(_seconds(lambda: copy_out(blocks, blocks)) for _ in range(COPIES))
    tokens = max(min(NUM_TOKENS, longest_step, _tokens_in(layout, num_blocks)), 1)
    prefill = min(_seconds(lambda: execute(_prompt(tokens, layout))) for _ in range(REPEATS))
    execute(StepPlan(0, leave=np.zeros(1, np.int32)))
    return RecoveryCosts(prefill / tokens, copying / count)


def _tokens_in(layout: KVLayout, num_blocks: int) -> int:
    """Tokens of a sequence that so many blocks hold in all groups."""
    return num_blocks // layout.blocks_for(layout.hit_tokens) * layout.hit_tokens


def _prompt(num_tokens: int, layout: KVLayout) -> StepPlan:
    """Slot 0 computes a prompt of zeros in the first blocks."""
    row = EnterRow(
        slot=0,
        token_ids=np.zeros(num_tokens, np.int32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_tables=tuple(
            np.array(blocks, np.int32) for blocks in layout.first_blocks(num_tokens)
        ),
        params=SamplingParams(max_tokens=1, temperature=0.0),
        seed=0,
        sample_index=0,
    )
    slot = np.zeros(1, np.int32)
    return StepPlan(0, leave=slot, enter=(row,), delta_slot=slot, delta_tokens=slot + num_tokens)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
