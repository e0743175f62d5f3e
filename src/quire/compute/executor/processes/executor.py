"""Runs steps on several ranks at once: rank 0 in this process, each other one in its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import msgspec

from quire.base.errors import ConfigError, EngineError, EngineLostError
from quire.base.platform.shared_region import SharedRegion
from quire.compute.executor.in_process import InProcessExecutor
from quire.compute.executor.launched_step import LaunchedStep
from quire.compute.executor.processes.given_weights import GivenWeights
from quire.compute.executor.processes.messages import (
    RankAdapter,
    RankCancel,
    RankDrop,
    RankMedia,
    RankMessage,
    RankMove,
    RankOp,
    RankReply,
    computes_with,
)
from quire.compute.executor.processes.rank_moves import RankMoves
from quire.compute.worker import Worker
from quire.ops.distributed.gloo import GlooMeeting
from quire.protocol.adapters import AdapterRef
from quire.protocol.block_moves import BlockMove, MoveOutcome
from quire.protocol.codec import encode
from quire.protocol.control import ControlOp, Inspect, LoadWeights, Report, UpdateWeights, WorkerOp
from quire.protocol.media import MediaInfo
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.step import IntArray, LateInput, StepPlan
from quire.protocol.step_codec import encode_late, encode_plan

__all__ = ["ProcessExecutor", "Ranks"]


Meeting = SharedRegion | GlooMeeting


class Ranks(Protocol):
    """The ranks 1 … size - 1, on this host or others. `RankGroup` describes the methods."""

    @property
    def meeting(self) -> Meeting: ...

    @property
    def pids(self) -> list[int]: ...

    @property
    def moved_pipes(self) -> list[int]: ...

    def start(self) -> None: ...

    def send(self, kind: RankMessage, message: bytes) -> None: ...

    def check(self) -> None: ...

    def replies(self) -> list[RankReply]: ...

    def first_failed(self, error: BaseException) -> None: ...

    def serve(self) -> None: ...

    def shutdown(self) -> None: ...

    def close(self) -> None: ...


class ProcessExecutor:
    """Gives each rank every plan, through a ring in shared memory. Each rank keeps all rows.

    Ranks meet only in the collectives of a forward. They draw the same tokens from the same logits,
    so the results of rank 0 hold for all. If a rank ends or hangs, the group ends: its steps fail,
    and no more are taken.
    """

    def __init__(self, make_worker: Callable[[Meeting], Worker], ranks: Ranks) -> None:
        """make_worker: makes the worker of rank 0, in the thread that computes. ranks: the others,
        which have been started and are loading."""
        self._group = ranks
        self._first = InProcessExecutor(
            lambda: make_worker(self._group.meeting), self._group.first_failed
        )
        self._adapters = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-adapters")
        self._moves = RankMoves(lambda: self._group.moved_pipes)
        self._loaded = LoadWeights()
        self._given = GivenWeights()
        self._asking = threading.Lock()  # held from a question to the ranks until all have answered

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks after the first."""
        return self._group.pids

    def start(self) -> Report:
        """Load rank 0 beside the others, and wait for all of them."""
        try:
            try:
                report = self._first.start()
            except EngineLostError:
                self._group.replies()  # raises the rank's own error
                raise
            _check_alike(report, self._group.replies())
            self._group.serve()
        except BaseException:
            self.shutdown()
            raise
        return report

    def control(self, op: ControlOp) -> Report:
        """Carry out an operation on all ranks at once. New weights are in all ranks, or in none."""
        if isinstance(op, Inspect):
            return self._first.control(op)
        if isinstance(op, UpdateWeights):
            return self._given.give(op, self._load_weights)
        if isinstance(op, LoadWeights) and not op.is_trial:
            return self._load_weights(op)
        if not isinstance(op, WorkerOp):
            raise EngineError(f"{type(op).__name__} is no operation of a worker")
        return self._on_all(op)

    def _load_weights(self, op: LoadWeights) -> Report:
        """Have all ranks check the files, then load them. If one fails, all go back."""
        self._on_all(msgspec.structs.replace(op, is_trial=True))
        try:
            report = self._on_all(op)
        except EngineLostError:
            raise
        except Exception as error:
            self._go_back(error)
            raise EngineError(f"{error}; all ranks have the weights from before") from error
        self._loaded = op
        return report

    def _go_back(self, error: Exception) -> None:
        """Have all ranks load what they had before an error. If one cannot, the group ends, since
        no two ranks may compute with different weights."""
        try:
            self._on_all(self._loaded)
        except Exception:
            self._group.first_failed(error)
            raise

    def _on_all(self, op: WorkerOp) -> Report:
        self._first.check()
        with self._asking:
            self._group.send(RankMessage.CONTROL, encode(RankOp(op)))
            try:
                report = self._first.control(op)
            finally:
                replies = self._group.replies()
        if report.recovery_costs is None:
            return report
        costs = [report.recovery_costs, *(reply.recovery_costs for reply in replies)]
        return _with_costs(report, [each for each in costs if each is not None])

    def execute(self, plan: StepPlan) -> LaunchedStep:
        """Start a step on all ranks. Raises EngineLostError if one is missing."""
        self._first.check()
        self._group.send(RankMessage.PLAN, encode_plan(plan))
        return self._first.execute(plan)

    def put_media(self, handle: int, data: object) -> MediaInfo:
        """Rank 0 reads or encodes them, and the others get its rows."""
        self._first.check()
        info = self._first.put_media(handle, data)
        rows = self._first.media_bytes(handle)
        self._group.send(RankMessage.MEDIA, encode(RankMedia(handle, info.num_tokens, rows)))
        return info

    def drop_media(self, handles: Sequence[int]) -> None:
        with contextlib.suppress(EngineLostError):  # then no rank has any more
            self._group.send(RankMessage.DROP_MEDIA, encode(RankDrop(tuple(handles))))
        self._first.drop_media(handles)

    def put_adapter(self, slot: int, ref: AdapterRef) -> Future[None]:
        """Have all ranks read the adapter, then put it into its slot."""
        self._first.check()
        return self._adapters.submit(self._put_adapter, slot, ref)

    def _put_adapter(self, slot: int, ref: AdapterRef) -> None:
        asked = encode(RankAdapter(slot, ref))
        with self._asking:
            self._group.send(RankMessage.READ_ADAPTER, asked)
            try:
                self._first.read_adapter(ref)
            finally:
                self._group.replies()
            self._group.send(RankMessage.PUT_ADAPTER, asked)
            try:
                self._first.put_adapter(slot, ref).result()
            finally:
                self._group.replies()

    def move_blocks(self, move: BlockMove) -> Future[MoveOutcome]:
        """Start a move on all ranks, each with its own files."""
        self._first.check()
        joint = self._moves.expect(move.ticket)
        self._group.send(RankMessage.MOVE, encode(RankMove(move)))
        own = self._first.move_blocks(move)
        own.add_done_callback(lambda done: self._moves.first_ended(move.ticket, done))
        return joint

    def cancel_move(self, ticket: int) -> None:
        """Cancel a move on all ranks; it ends when all have done so."""
        self._first.check()
        self._group.send(RankMessage.CANCEL_MOVE, encode(RankCancel(ticket)))
        self._first.cancel_move(ticket)

    def late(self, late: LateInput) -> None:
        self._first.check()
        self._group.send(RankMessage.LATE, encode_late(late))
        self._first.late(late)

    def made_drafts(self, step_id: int, *, wait: bool) -> Mapping[int, IntArray] | None:
        return self._first.made_drafts(step_id, wait=wait)

    def shutdown(self) -> None:
        """End the ranks before the threads that wait for their answers. Ranks may be waiting for
        rank 0 in a step that it no longer computes, with an adapter behind that step."""
        self._first.shutdown()
        self._adapters.shutdown(wait=False, cancel_futures=True)
        self._group.shutdown()
        self._adapters.shutdown(wait=True)
        self._moves.close()
        self._given.close()
        self._group.close()


def _check_alike(report: Report, replies: Sequence[RankReply]) -> None:
    """Raise ConfigError if a rank's host has another version or other kernels than this one. Its
    sums, and so its tokens, would differ."""
    own = computes_with(report)
    for reply in replies:
        if reply.computes_with != own:
            raise ConfigError(
                f"A rank's host computes with {reply.computes_with}, and rank 0 with {own}. "
                "Install one version everywhere, and use hosts with one kind of processor, or "
                "the same QUIRE_CPU_ISA on all of them."
            )


def _with_costs(report: Report, costs: Sequence[RecoveryCosts]) -> Report:
    """Return the largest costs of any rank, since all ranks wait for the slowest."""
    slowest = RecoveryCosts(
        max(each.seconds_per_token for each in costs),
        max(each.seconds_per_block for each in costs),
    )
    return replace(report, recovery_costs=slowest)
