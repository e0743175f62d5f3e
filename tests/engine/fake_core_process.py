"""An engine core process over the fake executor, for tests of everything around a core.

Run with one argument, the JSON of `FakeCoreOptions`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this file's folder

from quire.base.errors import ConfigError, EngineError  # noqa: E402
from quire.base.telemetry.flight.record import FlightRecorder  # noqa: E402
from quire.engine.core.engine_core import PlanObserver  # noqa: E402
from quire.engine.core.heartbeat import Progress  # noqa: E402
from quire.engine.supervision.core_process import StartedCore, run_core_process  # noqa: E402
from quire.protocol import StepPlan, StepResult  # noqa: E402
from quire.protocol.control import ControlOp, LoadWeights, Report  # noqa: E402
from quire.protocol.media import MediaInfo  # noqa: E402
from quire.protocol.messages import Launch  # noqa: E402
from quire.protocol.status import EngineCapacity  # noqa: E402
from quire.protocol.step import IntArray, LateInput  # noqa: E402
from tests.engine.fake_engine import FakeEngine  # noqa: E402
from tests.grammar.bundled_tokens import grammars  # noqa: E402

KILLER, HANGER, STOPPER = 9_001, 9_002, 9_003
"""Token ids of prompts that kill the process, hang a step, or stop the whole process."""


@dataclasses.dataclass(frozen=True)
class FakeCoreOptions:
    """step_s: shortest duration of a step. fault_after: steps that a row with a fatal token
    survives. start_file: the start ends when this exists, unless it is "". start_error: raised by
    the start of the instances from `error_from` on.
    breaks_weights: number of the replica in which files of weights with "broken" in their names
    pass the check and cannot be loaded."""

    step_s: float = 0.0
    fault_after: int = 0
    start_s: float = 0.0
    start_file: str = ""
    start_error: str = ""
    error_from: int = 0
    breaks_weights: int = -1
    num_blocks: int = 256
    block_size: int = 4
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    max_model_len: int = 256

    @classmethod
    def endless(cls, **options: Any) -> FakeCoreOptions:
        """Options of a core whose longest outputs take minutes, on any machine."""
        return cls(num_blocks=2**15, max_model_len=2**15, **options)

    def command(self) -> tuple[str, ...]:
        return (sys.executable, __file__, json.dumps(dataclasses.asdict(self)))


class FaultyExecutor:
    """Passes plans on, and does what the fatal tokens in their rows ask for."""

    def __init__(self, executor, options: FakeCoreOptions, replica: int) -> None:
        self._executor = executor
        self._breaks_weights = replica == options.breaks_weights
        self._options = options
        self._countdown: dict[int, tuple[int, int]] = {}  # slot: fatal token, steps left

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        for slot in plan.leave.tolist():
            self._countdown.pop(slot, None)
        for row in plan.enter:
            for fatal in (KILLER, HANGER, STOPPER):
                if fatal in row.token_ids:
                    self._countdown[row.slot] = (fatal, self._options.fault_after)
        for slot, (fatal, left) in list(self._countdown.items()):
            if left == 0:
                _fall(fatal)
            self._countdown[slot] = (fatal, left - 1)
        future = self._executor.execute(plan)
        compute = future.result

        def result(timeout: float | None = None) -> StepResult:
            time.sleep(self._options.step_s)
            return compute(timeout)

        future.result = result
        return future

    def late(self, late: LateInput) -> None:
        self._executor.late(late)

    def made_drafts(self, step_id: int, *, wait: bool) -> Mapping[int, IntArray] | None:
        return self._executor.made_drafts(step_id, wait=wait)

    def start(self) -> Report:
        return self._executor.start()

    def control(self, op: ControlOp) -> Report:
        is_load = isinstance(op, LoadWeights) and not op.is_trial
        if self._breaks_weights and is_load and any("broken" in each for each in op.files):
            raise EngineError("the new weights cannot be loaded: the engine goes on with the old")
        return self._executor.control(op)

    def put_media(self, handle: int, data: object) -> MediaInfo:
        return self._executor.put_media(handle, data)

    def drop_media(self, handles: Sequence[int]) -> None:
        self._executor.drop_media(handles)

    def shutdown(self) -> None:
        self._executor.shutdown()


def _fall(fatal: int) -> None:
    if fatal == KILLER:
        os.kill(os.getpid(), signal.SIGKILL)
    if fatal == STOPPER:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(3600)


def _build(
    launch: Launch, progress: Progress, on_plan: PlanObserver, flight: FlightRecorder
) -> StartedCore:
    options = FakeCoreOptions(**json.loads(sys.argv[1]))
    progress.enter("loading")
    time.sleep(options.start_s)
    while options.start_file and not Path(options.start_file).exists():
        time.sleep(0.01)
    if options.start_error and launch.instance >= options.error_from:
        kind, message = options.start_error.split(":", 1)
        raise ConfigError(message) if kind == "config" else RuntimeError(message)
    engine = FakeEngine(
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        vocab_size=1000,
        on_plan=on_plan,
        grammars=grammars(1000),
        flight=flight,
    )
    engine.core._executor = FaultyExecutor(engine.core._executor, options, launch.replica)
    capacity = EngineCapacity(
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        capacity_tokens=options.num_blocks * options.block_size,
        groups=((None, options.block_size),),
        uses_priority=False,
        description="fake",
    )
    return StartedCore(engine.core, capacity)


def main() -> int:
    return run_core_process(_build)


if __name__ == "__main__":
    sys.exit(main())
