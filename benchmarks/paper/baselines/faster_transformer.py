"""FasterTransformer with the scheduler that the PagedAttention paper gives it (section 6.1).

It takes up to B of the requests that came first, and no others before all of these have ended. B is
the largest batch whose sequences fit the memory when each may become as long as the model allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from benchmarks.paper.baselines.orca import MAX_LEN

from quire.base.errors import ConfigError
from quire.entrypoints.simulator.run import Served
from quire.entrypoints.simulator.step_cost import StepCost
from quire.entrypoints.simulator.workloads.trace import TraceRequest

__all__ = ["serve_faster_transformer"]


def serve_faster_transformer(
    trace: Sequence[TraceRequest], cost: StepCost, *, num_slots: int
) -> Served:
    """Serve a trace in order of arrival, on a clock that starts at 0. cost: cost of steps with K/V
    in one piece. ConfigError if not even one sequence fits."""
    sequences = num_slots // MAX_LEN
    if sequences < max(request.n for request in trace):
        raise ConfigError(f"{num_slots} slots hold no request whose sequences have {MAX_LEN} each")
    first, finished = np.zeros(len(trace)), np.zeros(len(trace))
    now = busy_s = row_seconds = 0.0
    start = num_steps = 0
    while start < len(trace):
        now = max(now, trace[start].arrival_s)
        end, room = start, sequences
        while end < len(trace) and trace[end].arrival_s <= now and trace[end].n <= room:
            room -= trace[end].n
            end += 1
        batch = trace[start:end]
        prompts = np.array([r.prompt_tokens for r in batch for _ in range(r.n)], np.int64)
        outputs = np.array([r.output_tokens for r in batch], np.int64)
        none, one = np.zeros_like(prompts), np.ones_like(prompts)
        began, now = now, now + cost.seconds(none, prompts, len(prompts))
        first[start:end] = now
        for step in range(int(outputs.max()) - 1):
            now += cost.seconds(prompts + step, one, len(prompts))
        finished[start:end] = now
        busy_s += now - began
        row_seconds += (now - began) * len(prompts)
        num_steps += int(outputs.max())
        start = end
    return Served(
        arrival_s=np.array([request.arrival_s for request in trace]),
        first_token_s=first,
        finished_s=finished,
        output_tokens=np.array([request.output_tokens for request in trace], np.int64),
        mean_running=row_seconds / busy_s,
        num_preempted=0,
        num_steps=num_steps,
        busy_s=busy_s,
    )
