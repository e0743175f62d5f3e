"""The engine core: scheduler on one side, executor on the other, and a few steps between them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.base.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    QuireError,
    RequestError,
)
from quire.base.platform.interrupts import let_through
from quire.base.platform.processes import state_of
from quire.base.telemetry.engine_stats import SchedulerStats
from quire.base.telemetry.flight.record import Doing, EventKind
from quire.compute.executor import Executor, StepFuture
from quire.engine.core.adapters import AdapterSlots
from quire.engine.core.event_publisher import EventPublisher
from quire.engine.core.hook_runner import HookRunner
from quire.engine.core.moving_blocks import MovingBlocks
from quire.engine.core.pin_list import PinList
from quire.plan.grammar import Grammars
from quire.plan.scheduler import Scheduler
from quire.protocol.control import (
    ControlOp,
    ExtendPrompt,
    Inspect,
    ListPins,
    LoadWeights,
    MapBlocks,
    Pause,
    PauseMode,
    Report,
    ResetPrefixCache,
    Resume,
    Sleep,
    TellFacts,
    Unpin,
    UpdateWeights,
    Wake,
    asleep,
)
from quire.protocol.media import ImageTiles, MediaInfo
from quire.protocol.request import EngineOutput, EngineRequest

__all__ = ["EngineCore", "PlanObserver"]

POLL_S = 0.005
"""Seconds between two looks at messages while requests wait for grammars, adapters or hooks and
nothing else is left to do."""

PlanObserver = Callable[[npt.NDArray[np.int64]], None]
"""Takes the handles of the sequences that are running."""


class _Opening(NamedTuple):
    """Tickets, what they wait for, and where the outcome goes: opened(ticket, result)."""

    tickets: list[int]
    future: Future[Any]
    opened: Callable[[int, Any], None]


class EngineCore:
    """Keeps up to `depth` steps in flight: step N + 1 is planned before the tokens of step N are
    known, so planning and output work hide behind the computation."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int = 2,
        on_plan: PlanObserver | None = None,
        report: Report | None = None,
        grammars: Grammars | None = None,
        hooks: HookRunner | None = None,
        num_adapter_slots: int = 0,
        *,
        takes_functions: bool = True,
        rank_pids: Callable[[], Sequence[int]] = tuple,
        publisher: EventPublisher | None = None,
        pin_list: PinList | None = None,
    ) -> None:
        """on_plan: told the handles of the running sequences before a step is executed. report: the
        executor's report of its start. grammars: None if requests may state none. hooks: runner of
        the hooks; the scheduler has its `watches`; None if nothing is watched. num_adapter_slots:
        adapters that may be in use at a time; 0 if requests may name none. takes_functions: whether
        the executor can call functions that requests bring. rank_pids: returns the processes of the
        ranks of the model, empty with one rank. publisher: publisher of KV events, which the core
        closes; None if there are none. pin_list: list of pins for the next engine, which the core
        closes; None if it keeps none."""
        self._scheduler = scheduler
        self.flight = scheduler.flight
        self._executor = executor
        self._depth = depth
        self._on_plan = on_plan
        self._grammars = grammars
        self._hooks = hooks
        self._takes_functions = takes_functions
        self._rank_pids = rank_pids
        self._in_flight: deque[StepFuture] = deque()
        self._opening: list[_Opening] = []
        self._moves = MovingBlocks(scheduler, executor, self._tell)
        self._adapters: AdapterSlots | None = None
        if num_adapter_slots:
            in_use = scheduler.adapter_slots_in_use
            self._adapters = AdapterSlots(num_adapter_slots, executor.put_adapter, in_use)
        self._held: deque[EngineOutput] = deque()  # of steps that ended before an operation
        self._is_paused = False
        self._is_torn = False  # while a step is made, and after it if an exception cut it short
        self._report = report or Report()
        self._publisher = publisher
        self._pin_list = pin_list
        self._num_images = self._num_kept_images = self._num_image_bytes = 0
        self._tell()

    def _tell(self) -> None:
        """Give the events of KV blocks to their publisher."""
        events = self._scheduler.state.kv.events
        if self._publisher is not None and events is not None:
            self._publisher.tell(events)

    def _list_pins(self, now: float) -> None:
        if self._pin_list is not None:
            self._pin_list.look(self._scheduler.state.pins, now)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. RequestError if this engine could never serve it,
        EngineUnavailableError while it sleeps."""
        self._check_awake()
        if request.params.logits_processors and not self._takes_functions:
            raise RequestError(
                "logits_processors are functions of this process, and tensor_parallel_size above 1 "
                "computes in several: leave them out, or use one rank"
            )
        if self._hooks is not None:
            self._hooks.check(request)
        elif request.params.hooks:
            raise RequestError(
                f"hooks names {request.params.hooks[0][:80]!r}, but this engine was started "
                "without output hooks: leave it out"
            )
        if request.grammar is None and request.adapter is None:
            self._scheduler.add(request)
        else:
            self._add_blocked(request)

    def _add_blocked(self, request: EngineRequest) -> None:
        """Queue a request that is blocked before its grammar has been compiled, and its adapter has
        a slot."""
        grammar = adapter = None
        if request.adapter is not None and self._adapters is None:
            raise RequestError(
                f"the request names the adapter {request.adapter.name!r}, but this engine takes "
                "none: start it with enable_lora (--enable-lora)"
            )
        if request.grammar is not None:
            if self._grammars is None:
                raise RequestError(
                    f"structured output ({request.grammar.kind}) needs the model's tokenizer, "
                    "which this engine was started without: leave it out"
                )
            request, grammar = self._grammars.bounded(request), self._grammars.open(request)
        try:
            tickets = self._scheduler.add(request)
        except BaseException:
            if grammar is not None:
                grammar.cancel()
            raise
        if grammar is not None:
            opened = self._scheduler.grammar_opened
            self._opening.append(_Opening(tickets.grammar, grammar, opened))
        if self._adapters is not None and request.adapter is not None:
            adapter = self._adapters.open(request.adapter)
            opened = self._scheduler.adapter_opened
            self._opening.append(_Opening(tickets.adapter, adapter, opened))

    def _take_opened(self) -> None:
        """Let requests go on that have what they were blocked for, and end those that can't."""
        group_of = self._scheduler.state.tickets.group_of
        opening, self._opening = self._opening, []
        for each in opening:
            if all(group_of(ticket) is None for ticket in each.tickets):
                each.future.cancel()  # nobody waits for it any more
        if self._adapters is not None:
            self._adapters.poll()
        for each in opening:
            if each.future.cancelled():
                continue
            if not each.future.done():
                self._opening.append(each)
                continue
            error = each.future.exception()
            for ticket in each.tickets:
                if error is None:
                    each.opened(ticket, each.future.result())
                else:
                    self._scheduler.opening_refused(ticket, _as_ours(error))

    def adapter_stats(self) -> Mapping[str, Any]:
        """Return the fields of `EngineStats` on adapters."""
        return {} if self._adapters is None else self._adapters.stats()

    def put_media(self, handle: int, data: object) -> MediaInfo:
        """See `Executor.put_media`. EngineUnavailableError while the engine sleeps."""
        self._check_awake()
        info = self._executor.put_media(handle, data)
        if isinstance(data, ImageTiles):  # which one thread puts, one after the other
            self._num_images += 1
            self._num_kept_images += info.was_kept
            self._num_image_bytes = info.num_kept_bytes
        return info

    def drop_media(self, handles: Sequence[int]) -> None:
        """Forget media that no request names which has not ended."""
        if handles:
            self._executor.drop_media(handles)

    def _check_awake(self) -> None:
        if self._report.sleep_level:
            raise EngineUnavailableError(asleep(self._report.sleep_level))

    def abort(self, handles: list[int]) -> None:
        """End sequences, whatever their state. Unknown or finished ones are ignored."""
        for handle in handles:
            self._scheduler.abort(handle)

    # --- between steps --------------------------------------------------------------------------

    def is_ready_for(self, op: ControlOp) -> bool:
        """Return whether `control` may follow: not while a pause waits for requests to end. Until
        it may, no new request is admitted."""
        if not isinstance(op, Pause | Sleep) or op.mode != "wait" or self._is_paused:
            return True
        self._scheduler.hold_admission(is_held=True)
        return not self._scheduler.has_admitted

    def stop_waiting(self) -> None:
        """The operation that `is_ready_for` was asked about follows now, or never."""
        self._scheduler.hold_admission(is_held=False)

    def control(self, op: ControlOp, now: float) -> Report:
        """Carry out an operation, after the steps in flight if it needs that; what they gave comes
        with the next `step`. Raises what the operation says of itself."""
        scheduler = self._scheduler
        if isinstance(op, ExtendPrompt):
            return replace(self._report, was_there=scheduler.extend(op))
        if isinstance(op, Inspect | MapBlocks | ListPins | TellFacts):
            return self._look(op, now)
        if isinstance(op, Unpin):
            was_there = scheduler.state.pins.release(op.handle)
            self._list_pins(now)
            return replace(self._report, was_there=was_there)
        if isinstance(op, Pause | Sleep | Resume | Wake):
            self.stop_waiting()
        self._settle()
        self.flight.enter(Doing.IN_CONTROL)
        self.flight.event(EventKind.CONTROL, -1, text=type(op).__name__)
        was_paused = self._is_paused
        try:
            return self._carry_out(op)
        finally:
            if self._is_paused != was_paused:
                scheduler.state.records.pause(now, is_paused=self._is_paused)
            self._tell()
            self._list_pins(now)
            self.flight.enter(Doing.BETWEEN_STEPS)

    def _carry_out(self, op: ControlOp) -> Report:
        """Carry out an operation while no step is in flight."""
        scheduler = self._scheduler
        if isinstance(op, ResetPrefixCache):
            scheduler.reset_prefix_cache(reset_running=op.reset_running)
        elif isinstance(op, Pause):
            self._pause(op.mode)
        elif isinstance(op, Resume):
            self._resume()
        elif isinstance(op, Sleep):
            return self._sleep(op)
        elif isinstance(op, Wake):
            return self._wake(op)
        elif isinstance(op, LoadWeights) and op.is_trial:
            self._executor.control(op)
        elif isinstance(op, UpdateWeights | LoadWeights):
            return self._update_weights(op)
        else:
            return self._ask(op)
        return self._report

    def _look(self, op: Inspect | MapBlocks | ListPins | TellFacts, now: float) -> Report:
        """The answer to a question, for which no step is waited."""
        if isinstance(op, MapBlocks):
            began = time.perf_counter()
            states, view = self._scheduler.block_states(), self._scheduler.view(now, op.steps_s)
            view = replace(view, took_s=time.perf_counter() - began)
            return replace(self._report, blocks=states, view=view)
        if isinstance(op, TellFacts):
            facts = self._scheduler.facts(op.tenant, op.request_ids, now)
            return replace(self._report, facts=facts)
        if isinstance(op, ListPins):
            pins = self._scheduler.state.pins
            return replace(self._report, pins=pins.list(now), lost_pins=pins.lost)
        return self._report

    def _ask(self, op: ControlOp) -> Report:
        """The executor's report; what it says of the engine's state is remembered."""
        report = replace(self._executor.control(op), is_paused=self._is_paused)
        self._report = replace(
            self._report,
            weights_version=report.weights_version,
            weights=report.weights,
            loaded=report.loaded,
            sleep_level=report.sleep_level,
        )
        return report

    def _settle(self) -> None:
        """Wait for the steps in flight."""
        while self._in_flight:
            self._held.append(self._labelled(self._take_oldest()))

    def _labelled(self, output: EngineOutput) -> EngineOutput:
        """Return an output with the weights that are in use, unless they are the checkpoint's."""
        if not self._report.weights_version:
            return output
        return replace(output, weights=self._report.weights)

    def _pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._scheduler.abort_all("the engine was paused and ends what it had: send it again")
        self._set_paused(is_paused=True)

    def _resume(self) -> None:
        if self._report.sleep_level:
            raise RequestError("the engine sleeps: wake it up instead")
        self._set_paused(is_paused=False)

    def _set_paused(self, *, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._report = replace(self._report, is_paused=is_paused)

    def _sleep(self, op: Sleep) -> Report:
        if op.level not in (1, 2):
            raise RequestError(
                f"the sleep level is {op.level}: give 1 (KV cache) or 2 (weights too)"
            )
        self._pause(op.mode)
        self._moves.finish()
        self._scheduler.vacate()
        if op.level == 2:
            self._num_image_bytes = 0  # they go with the encoder
        return self._ask(op)

    def _wake(self, op: Wake) -> Report:
        if not self._report.sleep_level:
            return self._report
        self._ask(op)
        self._resume()
        return self._report

    def _update_weights(self, op: UpdateWeights | LoadWeights) -> Report:
        """Replace weights; requests are computed again with those that are there then."""
        self._moves.finish()
        before = self._report.weights_version
        try:
            report = self._ask(op)
        except (RequestError, ConfigError):
            raise  # refused before anything changed
        except BaseException:
            self._scheduler.vacate()
            self._ask(Inspect())
            self._set_paused(is_paused=self._is_paused or self._report.sleep_level > 0)
            raise
        if report.weights_version != before:
            self._scheduler.vacate(has_new_weights=True)
            self._num_image_bytes = 0
        return report

    @property
    def report(self) -> Report:
        """The state of the engine."""
        return self._report

    # --- steps ----------------------------------------------------------------------------------

    @property
    def uses_priority(self) -> bool:
        """True if requests may name a priority."""
        return self._scheduler.uses_priority

    @property
    def waits_for_input(self) -> bool:
        """True if a step could do nothing before some prompt goes on, or the engine does."""
        is_opening = bool(self._opening) and not self._report.sleep_level
        is_coming = is_opening or self._moves.are_loading
        if self._in_flight or self._held or is_coming or self._awaits_hooks:
            return False
        return self._scheduler.waits_for_input or (self._is_paused and not self._has_news)

    @property
    def _has_news(self) -> bool:
        return self._scheduler.state.outputs.has_any

    @property
    def _awaits_hooks(self) -> bool:
        return self._hooks is not None and self._scheduler.waits_for_verdicts

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._in_flight or self._held)

    def step(self, now: float) -> EngineOutput:
        """Fill the pipeline, wait for its oldest step, and return what that gave to the clients.

        An exception in the wait, as Ctrl-C, changes nothing. After one elsewhere, as of a handler
        of signals, the scheduler and the steps in flight may disagree: the next call gives them up.
        """
        if self._held:
            return self._held.popleft()
        if self._is_torn:
            self._is_torn = False
            return self._labelled(self._lose_steps(EngineError("an exception cut it short")))
        self._is_torn = True
        output = self._labelled(self._step(now))
        self._is_torn = False
        self._tell()
        self._list_pins(now)
        return output

    def _step(self, now: float) -> EngineOutput:
        if self._opening and not self._report.sleep_level:  # slots of adapters are asleep too
            self._take_opened()
        self._moves.take()
        if self._hooks is not None:
            self._consult(self._hooks)
        while len(self._in_flight) < self._depth and not self._is_paused:
            if self._scheduler.awaits_results:
                break
            begin = self.flight.enter(Doing.PLANNING)
            plan = self._scheduler.plan(now)
            if plan is None:
                break
            planned = self.flight.enter(Doing.GIVING)
            if self._on_plan is not None:
                self._on_plan(self._scheduler.running_handles())
            self._in_flight.append(self._executor.execute(plan))
            self.flight.given(begin, planned)
        self._moves.start()
        if self._in_flight:
            return self._take_oldest()
        if (self._opening or self._moves.futures) and not self._has_news:
            self.flight.enter(Doing.AWAITING_OPENINGS)
            futures = [*(each.future for each in self._opening), *self._moves.futures]
            wait(futures, POLL_S, FIRST_COMPLETED)
        elif self._hooks is not None and self._awaits_hooks and not self._has_news:
            self.flight.enter(Doing.AWAITING_HOOKS)
            self._hooks.wait(POLL_S)
            self._consult(self._hooks)
            return self._scheduler.flush()  # what a verdict lets go on is planned next
        return self._flush()

    @property
    def is_moving(self) -> bool:
        """True if blocks are on their way to the disk or back; `take_moved` is to be called now and
        then."""
        return bool(self._moves.futures)

    def take_moved(self) -> None:
        """Take in the moves that have ended, and start those that follow."""
        self._moves.take()

    def _consult(self, hooks: HookRunner) -> None:
        """Take what hooks have answered, and ask what there is to ask."""
        scheduler = self._scheduler
        for verdict in hooks.verdicts():
            scheduler.judge(verdict)
        hooks.ask(scheduler.questions())
        hooks.forget(scheduler.forgotten())

    def _take_oldest(self) -> EngineOutput:
        """Return the output of the oldest step in flight."""
        future = self._in_flight[0]
        self._give_late_input(wait=True)
        begin = self.flight.enter(Doing.AWAITING_RESULT)
        try:
            with let_through():
                result = future.result()
        except BaseException as error:
            if not future.done() or future.exception() is not error:
                self._is_torn = False
                raise  # Ctrl-C ended the wait, not the step: its result is still to come
            return self._lose_steps(error)  # whatever it was, the engine must go on
        self._in_flight.popleft()
        self.flight.waited(begin)
        if self._hooks is not None:
            self._consult(self._hooks)  # so that what passes leaves with this step's output
        output = self._scheduler.apply(result)
        self._moves.start()
        self._give_late_input(wait=False)
        if self._hooks is not None:
            self._consult(self._hooks)
        self.flight.applied()
        return output

    def _give_late_input(self, *, wait: bool) -> None:
        """Give the oldest step in flight the input that it awaits. Its forward is under way
        meanwhile. wait: also if a model still makes the drafts that the input depends on."""
        step_id = self._scheduler.awaits_drafts_of
        if step_id is None:
            late = self._scheduler.late_input()
        else:
            self.flight.enter(Doing.AWAITING_DRAFTS)
            made = self._executor.made_drafts(step_id, wait=wait)
            late = None if made is None else self._scheduler.late_input(made)
        if late is not None:
            self._executor.late(late)
            self._scheduler.late_input_given(late.step_id)

    def _flush(self) -> EngineOutput:
        output = self._scheduler.flush()
        is_idle = self._is_paused or self._scheduler.waits_for_input or self._awaits_hooks
        is_idle |= self.is_moving
        if not output.finished and not is_idle:
            raise EngineError(
                f"nothing can be planned although requests wait ({self._scheduler.stats()}): "
                "this is a fault of the scheduler, please report it"
            )
        return output

    def _lose_steps(self, error: BaseException) -> EngineOutput:
        """A step failed as a whole: end the requests that were in flight, keep the others."""
        self.flight.fault(f"a step was lost ({type(error).__name__}: {error})")
        for late in self._scheduler.release_late_inputs():
            self._executor.late(late)
        for future in self._in_flight:
            with contextlib.suppress(Exception, SystemExit):
                future.result()  # steps after a lost one must have ended, whatever they gave
        self._in_flight.clear()
        return self._scheduler.fail_running(
            f"the engine lost the step that computed this request ({error}): send it again"
        )

    def rank_stats(self) -> Mapping[str, Any]:
        """Fields of `EngineStats` on the ranks of the model."""
        states = [state_of(pid) for pid in self._rank_pids()]
        return {
            "rank_cpu_seconds": tuple(each.cpu_seconds for each in states),
            "rank_resident_bytes": tuple(each.resident_bytes for each in states),
        }

    def event_stats(self) -> Mapping[str, Any]:
        """Fields of `EngineStats` on KV events."""
        return {} if self._publisher is None else self._publisher.stats()

    def stats(self) -> SchedulerStats:
        return replace(
            self._scheduler.stats(),
            mm_cache_queries_total=self._num_images,
            mm_cache_hits_total=self._num_kept_images,
            mm_cache_bytes=self._num_image_bytes,
        )

    def check_invariants(self) -> None:
        """Raise EngineError if the bookkeeping is broken; for tests and debugging."""
        self._scheduler.check_invariants()

    def shutdown(self) -> None:
        """Let steps in flight end, and free the executor's resources."""
        self._in_flight.clear()
        self._moves.finish()
        if self._pin_list is not None:
            self._pin_list.close()
        self._executor.shutdown()
        if self._publisher is not None:
            self._publisher.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._hooks is not None:
            self._hooks.close()


def _as_ours(error: BaseException) -> QuireError:
    if isinstance(error, QuireError):
        return error
    return EngineError(f"the request could not be prepared ({error!r}): send it again")
