"""The loop of an engine core process: take messages, run a step, send what it gave."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from quire.base.errors import EngineUnavailableError, QuireError, RequestError
from quire.base.telemetry import EngineStats
from quire.base.telemetry.engine_stats import STEP_TOKEN_BOUNDS
from quire.base.telemetry.flight.record import Doing
from quire.engine.core.client_table import ClientTable, ConnectedClient, split_by_client
from quire.engine.core.engine_core import EngineCore
from quire.engine.core.heartbeat import Progress
from quire.engine.core.in_flight import InFlightRecord
from quire.engine.core.media_intake import MediaIntake
from quire.engine.core.socket import CoreSocket
from quire.protocol.codec import Codec, GarbledMessageError, encode
from quire.protocol.control import (
    RESUMED,
    ExtendPrompt,
    LoadWeights,
    Pause,
    Report,
    Resume,
    Sleep,
    Wake,
)
from quire.protocol.messages import (
    HANDLES_PER_CLIENT,
    MAX_CLIENTS,
    PROTOCOL_VERSION,
    Abort,
    Add,
    Answer,
    ClientMessage,
    Control,
    CoreMessage,
    DropMedia,
    Extend,
    Goodbye,
    Hello,
    Output,
    Probe,
    PutMedia,
    Refused,
    Rejected,
    Welcome,
    client_of,
)
from quire.protocol.request import (
    EMPTY_HANDLES,
    EngineOutput,
    EngineRequest,
    FinishReason,
    SequenceFinish,
)
from quire.protocol.step import EMPTY_INTS

__all__ = ["CoreLoop"]

logger = logging.getLogger("quire")

STATS_INTERVAL_S = 0.1
MOVES_INTERVAL_S = 0.05
"""Between looks at blocks that are on their way to the disk while no request is there."""

PROBE_INTERVAL_S = 1.0
"""A client that vanished is found out at once when something is sent to it. One whose prompts are
all open may be sent nothing for ever, and so is probed."""


class CoreLoop:
    """Serves its clients until it is told to stop. One thread runs it.

    Messages are taken between steps: an abort is part of the next plan. What one message or one
    request does wrong is answered to its sender and ends nothing else; an exception that leaves
    `run` is a fault of the engine.
    """

    def __init__(
        self,
        core: EngineCore,
        socket: CoreSocket,
        progress: Progress,
        in_flight: InFlightRecord,
        *,
        welcome: Welcome,
        max_message_bytes: int,
        note_rest: Callable[[Report], None],
    ) -> None:
        """welcome: answer to clients, as it is at the start. note_rest: told the state of the core
        when it was paused, sleeps, goes on, or has new weights."""
        self._core = core
        self._socket = socket
        self._progress = progress
        self._in_flight = in_flight
        self._note_rest = note_rest
        self._welcome = welcome
        self._codec: Codec[ClientMessage] = Codec(ClientMessage, max_message_bytes)
        self._clients = ClientTable()
        self._media = MediaIntake(core, socket.wake)
        self._is_stopped = False
        self._operations: list[tuple[int, Control]] = []  # asked for by which client
        self._version = 0
        self._progress.sleep_state = 0, core.report.sleep_level
        self._counts = dict.fromkeys(
            ("generation_tokens_total", "requests_total", "refused_total", "aborted_total"), 0
        )
        self._num_garbled = 0
        self._step_seconds = 0.0
        self._step_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._stats_due = 0.0
        self._probe_due = 0.0

    def drain(self) -> None:
        """Serve what is there, refuse what comes, and end when nothing is left but open prompts
        that wait for their clients, which send them to the next core."""
        self._progress.is_draining = True

    def stop(self) -> None:
        """Stop after the present step, even if requests are unfinished."""
        self._is_stopped = True

    def run(self) -> None:
        with self._media:
            self._run()

    def _run(self) -> None:
        while not self._is_stopped:
            self._take_messages()
            self._take_media()
            self._control()
            if self._core.has_unfinished and not self._core.waits_for_input:
                self._step()
                continue
            self._in_flight.clear()
            if self._progress.is_draining and not self._media.is_busy:
                return
            self._core.take_moved()
            self._look_around(time.monotonic(), is_idle=True)
            self._core.flight.enter(Doing.IDLE)
            self._socket.wait(self._idle_seconds())
            self._core.flight.enter(Doing.BETWEEN_STEPS)

    def _idle_seconds(self) -> float | None:
        """Return how long there is nothing to do but what messages ask for; None: for ever."""
        if self._core.is_moving:
            return MOVES_INTERVAL_S
        return PROBE_INTERVAL_S if self._core.has_unfinished else None

    # --- operations -----------------------------------------------------------------------------

    def _control(self) -> None:
        """Carry out the requested operations in order. One that must wait for requests to end lets
        later ones pass, but for pauses; going on ends its wait."""
        operations, self._operations = self._operations, []
        for client_id, message in operations:
            if isinstance(message.op, Resume | Wake):
                self._end_waits()
            is_behind = bool(self._operations) and isinstance(message.op, Pause | Sleep)
            if is_behind or not self._core.is_ready_for(message.op):
                self._operations.append((client_id, message))
                continue
            self._carry_out(client_id, message)

    def _carry_out(self, client_id: int, message: Control) -> None:
        report, reason = None, ""
        try:
            report = self._core.control(message.op, time.monotonic())
        except QuireError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("operation %r failed", message.op)
            reason = f"the engine could not do it ({error!r})"
        self._answer(client_id, message, report, reason)

    def _end_waits(self) -> None:
        """Carry out what need not wait, and refuse the rest."""
        waiting, self._operations = self._operations, []
        for client_id, message in waiting:
            if self._core.is_ready_for(message.op):
                self._carry_out(client_id, message)
                continue
            self._core.stop_waiting()
            self._answer(client_id, message, None, RESUMED)

    def _answer(self, client_id: int, message: Control, report: Report | None, reason: str) -> None:
        if isinstance(message.op, Pause | Resume | Sleep | Wake | LoadWeights):
            self._leave_rest()
        self._version += 1
        self._progress.sleep_state = self._version, self._core.report.sleep_level
        client = self._clients.of_id(client_id)
        if client is not None:
            self._send(client, Answer(message.query, report, reason, self._version))

    def _leave_rest(self) -> None:
        try:
            self._note_rest(self._core.report)
        except OSError as error:
            logger.warning("the next core will not know the state of this one: %s", error)

    # --- steps ----------------------------------------------------------------------------------

    def _step(self) -> None:
        self._progress.begin_step()
        output = self._core.step(time.monotonic())
        self._step_seconds += self._progress.end_step()
        num_tokens = output.num_tokens
        self._counts["generation_tokens_total"] += num_tokens
        self._step_tokens[bisect.bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        if num_tokens or output.finished or output.num_cached_tokens or output.prompt_logprobs:
            self._send_output(output)
        self._look_around(time.monotonic())

    def _send_output(self, output: EngineOutput) -> None:
        """Send one message to each client that has updates from the step."""
        self._clients.finished(finish.handle for finish in output.finished)
        for client_id, part in split_by_client(output).items():
            client = self._clients.of_id(client_id)
            if client is not None:
                self._send(client, Output(part))

    def _send(self, client: ConnectedClient, message: CoreMessage) -> None:
        if not self._socket.send(client.peer, encode(message)):
            self._drop(client, "is gone")

    def _look_around(self, now: float, *, is_idle: bool = False) -> None:
        """Do the periodic work beside steps. is_idle: whether there will be no next time soon."""
        if is_idle or now >= self._stats_due:
            self._report_stats(now)
        if now >= self._probe_due:
            self._probe_due = now + PROBE_INTERVAL_S
            self._probe_clients()

    def _probe_clients(self) -> None:
        for client in self._clients:
            if client.live and not self._socket.is_owed(client.peer):
                self._send(client, Probe())

    def _report_stats(self, now: float) -> None:
        self._stats_due = now + STATS_INTERVAL_S
        self._progress.stats = EngineStats.of(
            self._core.stats(),
            **self._core.adapter_stats(),
            **self._core.rank_stats(),
            **self._core.event_stats(),
            step_seconds_total=self._step_seconds,
            step_tokens=tuple(self._step_tokens),
            garbled_messages_total=self._num_garbled,
            **self._counts,
        )

    # --- messages -------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        for peer, data in self._socket.receive():
            try:
                self._take(peer, self._codec.decode(data))
            except GarbledMessageError as error:
                self._num_garbled += 1
                logger.warning("a client's message was refused: %s", error)
        for peer in self._socket.send_owed():
            client = self._clients.of_peer(peer)
            if client is not None:
                self._drop(client, "is gone")

    def _take(self, peer: bytes, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            self._greet(peer, message)
            return
        client = self._clients.of_peer(peer)
        if client is None and isinstance(message, Abort | Goodbye):
            # A send to it has failed before this was read, so that nothing of it is left.
            logger.debug("%s of a client that is not there", type(message).__name__)
            return
        if client is None:
            raise GarbledMessageError(f"{type(message).__name__} of a client that said no Hello")
        if isinstance(message, Add):
            self._add(client, message.request)
        elif isinstance(message, Abort):
            self._abort(client, message.handles)
        elif isinstance(message, Extend):
            self._extend(client, message)
        elif isinstance(message, Control):
            self._operations.append((client.client_id, message))
        elif isinstance(message, PutMedia):
            self._put_media(client, message)
        elif isinstance(message, DropMedia):
            self._drop_media(client, message.handles)
        else:
            self._drop(client, "has left")

    def _greet(self, peer: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            reason = (
                f"the client speaks version {hello.version} of the protocol and the engine core "
                f"version {PROTOCOL_VERSION}: start both from the same installation"
            )
        elif not 0 <= hello.client_id < MAX_CLIENTS:
            reason = f"client number {hello.client_id} is not in 0 … {MAX_CLIENTS - 1}"
        else:
            for known in (self._clients.of_id(hello.client_id), self._clients.of_peer(peer)):
                if known is not None:
                    self._drop(known, "has connected again")
            self._clients.enter(hello.client_id, peer)
            version, level = self._progress.sleep_state
            welcome = msgspec.structs.replace(
                self._welcome, state_version=version, sleep_level=level
            )
            self._socket.send(peer, encode(welcome))
            return
        logger.warning("a client was rejected: %s", reason)
        self._socket.send(peer, encode(Rejected(reason)))

    def _add(self, client: ConnectedClient, request: EngineRequest) -> None:
        first = request.first_handle + request.first_sample
        handles = range(first, first + request.params.n)
        owned = client.client_id * HANDLES_PER_CLIENT
        if not (owned <= first and handles[-1] < owned + HANDLES_PER_CLIENT):
            raise GarbledMessageError(f"client {client.client_id} does not own handle {first}")
        if not client.live.isdisjoint(handles):
            raise GarbledMessageError(f"handle {first} of client {client.client_id} is in use")
        self._counts["requests_total"] += 1
        if self._progress.is_draining:
            self._fail(client, handles, "the engine is shutting down: send the request again")
            return
        named = {each.span.handle for each in request.media}
        if self._media.hold(client, request, named):
            client.live.update(handles)
            return
        self._admit(client, request, handles)

    def _admit(self, client: ConnectedClient, request: EngineRequest, handles: range) -> None:
        try:
            if not client.media.issuperset(each.span.handle for each in request.media):
                raise RequestError("the engine has not got the embeddings of the prompt")
            self._core.add(request)
        except EngineUnavailableError as error:
            self._fail(client, handles, str(error))
        except RequestError as error:
            self._counts["refused_total"] += 1
            self._socket.send(client.peer, encode(Refused(request.first_handle, str(error))))
        except Exception as error:
            logger.exception("request %s cannot be added", request.request_id)
            self._fail(client, handles, f"the engine cannot take this request ({error!r})")
        else:
            client.live.update(handles)

    def _put_media(self, client: ConnectedClient, message: PutMedia) -> None:
        if client_of(message.handle) != client.client_id:
            raise GarbledMessageError(
                f"client {client.client_id} does not own handle {message.handle}"
            )
        self._media.put(client, message)

    def _take_media(self) -> None:
        """Answer for media that are there now, or cannot be, and admit what waited for them."""
        for ended in self._media.take_ended():
            client = self._clients.of_id(client_of(ended.handle))
            if client is None or ended.handle not in client.coming:
                self._core.drop_media([ended.handle])
                continue
            client.coming.discard(ended.handle)
            report = None
            if ended.info is not None:
                client.media.add(ended.handle)
                report = replace(self._core.report, media=ended.info)
            self._send(client, Answer(ended.query, report, ended.reason, self._version))
        for client, request in self._media.take_held():
            first = request.first_handle + request.first_sample
            handles = range(first, first + request.params.n)
            client.live.difference_update(handles)
            self._admit(client, request, handles)

    def _drop_media(self, client: ConnectedClient, handles: Iterable[int]) -> None:
        self._media.cancel(client, handles)
        own = client.media & set(handles)
        client.media -= own
        self._core.drop_media(list(own))

    def _extend(self, client: ConnectedClient, message: Extend) -> None:
        """An open request that has ended is not live any more."""
        handle = message.handle
        if handle not in client.live:
            return
        try:
            op = ExtendPrompt(handle, message.token_ids, message.is_last)
            self._core.control(op, time.monotonic())
        except RequestError as error:
            self._counts["refused_total"] += 1
            self._core.abort([handle])
            self._send(client, Refused(handle, str(error)))

    def _fail(self, client: ConnectedClient, handles: range, message: str) -> None:
        self._core.abort(list(handles))
        finished = tuple(SequenceFinish(h, FinishReason.ERROR, message=message) for h in handles)
        output = EngineOutput(EMPTY_HANDLES, EMPTY_INTS, finished=finished)
        self._socket.send(client.peer, encode(Output(output)))

    def _abort(self, client: ConnectedClient, handles: list[int]) -> None:
        """Abort the client's own requests; handles of other clients are not live here and are
        ignored."""
        own = [handle for handle in handles if handle in client.live]
        self._counts["aborted_total"] += len(own)
        held = self._media.let_go(own)
        if held:
            client.live -= set(held)
            finished = tuple(SequenceFinish(handle, FinishReason.ABORT) for handle in held)
            self._send(client, Output(EngineOutput(EMPTY_HANDLES, EMPTY_INTS, finished=finished)))
        self._core.abort(own)

    def _drop(self, client: ConnectedClient, why: str) -> None:
        logger.info(
            "client %d %s, with %d sequences unfinished", client.client_id, why, len(client.live)
        )
        client.live.difference_update(self._media.let_go(client.live))
        self._abort(client, list(client.live))
        self._drop_media(client, client.media | client.coming)
        self._clients.leave(client)
        self._socket.forget(client.peer)
