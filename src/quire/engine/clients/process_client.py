"""`AsyncEngineClient` of an engine core in another process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import zmq.asyncio

from quire.base.errors import EngineUnavailableError, RequestError
from quire.base.telemetry import EngineStats
from quire.config.feasibility import check_servable
from quire.engine.clients.core_connection import CoreConnection
from quire.engine.clients.core_queries import CoreQueries
from quire.engine.clients.engine_watch import EngineWatch
from quire.engine.clients.open_requests import HandleCounter, OpenRequests
from quire.engine.clients.request_stream import RequestStream
from quire.engine.core.heartbeat import heartbeats
from quire.engine.core.in_flight import read_in_flight
from quire.protocol.codec import encode
from quire.protocol.control import (
    AdminOp,
    LoadWeights,
    Pause,
    Report,
    Resume,
    Sleep,
    Unpin,
    Wake,
)
from quire.protocol.media import ImageData, MediaInfo
from quire.protocol.messages import (
    Abort,
    Add,
    Answer,
    Control,
    CoreMessage,
    DropMedia,
    Extend,
    Output,
    Probe,
    PutMedia,
    Refused,
    Rejected,
    Welcome,
)
from quire.protocol.request import EngineRequest
from quire.protocol.status import EngineCapacity, EngineState, EngineStatus
from quire.protocol.step import IntArray

__all__ = ["ProcessEngineClient"]

logger = logging.getLogger("quire")

CONNECT_AGAIN_S = 0.1
MAX_FAILED_GREETINGS = 5
"""Connections in a row that fail before the core's welcome until the core is given up: its messages
cannot be used at all."""

MESSAGE_HEAD_BYTES = 64
"""Upper bound on the bytes of `PutMedia` beside its data."""

NO_QUERY = -1
"""Number of a question whose answer is ignored."""

CLOSED = "the server is shutting down"


class ProcessEngineClient:
    """Talks to whichever core serves in a directory, and to the next one when that dies.

    client_id: different for every front of a core. handles: counter shared with other clients of
    this id, if there are any; then streams may move between them. max_replays: see `Replays`.
    max_message_bytes: largest size of an encoded request. restart_timeout_s: streams fail when no
    core has come back for so long. silence_s, stalled_step_s: the core counts as stalled after so
    long without a heartbeat, or in one step. stuck_step_s: see `EngineWatch`.

    Create it within the event loop that will use it, and `close` it there.
    """

    def __init__(
        self,
        directory: Path,
        *,
        client_id: int = 0,
        handles: HandleCounter | None = None,
        max_replays: int = 2,
        max_message_bytes: int = 64 * 2**20,
        restart_timeout_s: float = 300.0,
        silence_s: float = 3.0,
        stalled_step_s: float = 30.0,
        stuck_step_s: float = 5.0,
    ) -> None:
        self._directory = directory
        self._client_id = client_id
        self._max_message_bytes = max_message_bytes
        self._restart_timeout_s = restart_timeout_s
        self._silence_s = silence_s
        self._handles = handles or HandleCounter(client_id)
        self._max_replays = max_replays
        self._open = OpenRequests(self._handles.reserve, max_replays)
        self.on_core_lost: Callable[[], None] | None = None
        self.on_beat: Callable[[], None] | None = None
        self._queries = CoreQueries()
        self._media: dict[int, bytes | ImageData] = {}  # by handle
        self._media_in_core: set[int] = set()
        self._watch = EngineWatch(stalled_step_s, stuck_step_s)
        self._context = zmq.asyncio.Context()
        self._connection: CoreConnection | None = None
        self._restart_deadline: asyncio.TimerHandle | None = None
        self._must_replay = False  # the requests of the last core
        self._owed: list[Control] = []  # to be carried out by this core or the next, in order
        self._num_owed = 0
        self._num_garbled = 0
        self._became_idle = asyncio.Event()
        self._tasks = [
            self._spawn(self._stay_connected()),
            self._spawn(self._follow_heartbeats()),
        ]

    # --- AsyncEngineClient ----------------------------------------------------------------------

    def reserve_handles(self, count: int) -> int:
        return self._handles.reserve(count)

    async def add(self, request: EngineRequest) -> RequestStream:
        connection, capacity = self._require_core(EngineState.READY)
        request = _without_text(request)
        data = self._encoded(request)
        check_servable(request, capacity)
        stream = self._open.open(request, self._send_abort)
        self._send_media(connection, request)
        connection.send_bytes(data)
        return stream

    async def put_media(
        self, handle: int, data: bytes | ImageData, *, is_spare: bool = False
    ) -> MediaInfo:
        """See `AsyncEngineClient`. If the core dies before it has the media, the next one gets
        them, as often as a request is replayed."""
        num_deaths = 0
        while True:
            instance = self._watch.instance
            try:
                return await self.put_media_once(handle, data, is_spare=is_spare)
            except EngineUnavailableError:
                num_deaths += 1
                has_died = instance is not None and self._watch.instance != instance
                if not has_died or num_deaths > self._max_replays:
                    raise
            await self._until_ready()

    async def _until_ready(self) -> None:
        """Wait for the next core. EngineUnavailableError if none comes."""
        try:
            async with asyncio.timeout(self._restart_timeout_s):
                while (status := self.status).state is not EngineState.READY:
                    if status.state in (EngineState.DEAD, EngineState.DRAINING):
                        self._require_core(EngineState.READY)
                    await self.wait_for_change(status)
        except TimeoutError as error:
            raise EngineUnavailableError(self._not_back) from error

    async def put_media_once(
        self, handle: int, data: bytes | ImageData, *, is_spare: bool = False
    ) -> MediaInfo:
        """See `AsyncEngineClient.put_media`; EngineUnavailableError too if the core dies before it
        has the media."""
        connection, _ = self._require_core(EngineState.READY)
        num_bytes = data.num_bytes if not isinstance(data, bytes) else len(data)
        self._check_size(num_bytes + MESSAGE_HEAD_BYTES)
        self._media[handle] = data
        self._media_in_core.add(handle)
        try:
            answer: Answer = await self._queries.ask(
                lambda query: connection.send(PutMedia(query, handle, data, is_spare))
            )
            if answer.report is None or answer.report.media is None:
                raise RequestError(answer.message)
        except BaseException:  # whoever waited may be gone
            self.drop_media((handle,))
            raise
        return answer.report.media

    def keep_media(self, handle: int, data: bytes | ImageData) -> None:
        """Keep media that another core has taken: they are sent with the first request that comes
        here and has them."""
        self._media[handle] = data

    def drop_media(self, handles: Iterable[int]) -> None:
        known = [handle for handle in handles if self._media.pop(handle, None) is not None]
        in_core = [handle for handle in known if handle in self._media_in_core]
        self._media_in_core.difference_update(known)
        if in_core and self._connection is not None and self._watch.instance is not None:
            self._connection.send(DropMedia(in_core))

    def abort(self, handles: Iterable[int]) -> None:
        self._open.abort(handles)
        self._check_idle()

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> None:
        request = self._open.extended(handle, token_ids, is_last=is_last)
        if request is None:
            return
        self._encoded(request)  # the next core may have to be sent all of it at once
        in_core = self._open.set_request(handle, request)
        if in_core is not None and self._connection is not None:
            self._connection.send(Extend(in_core, token_ids, is_last))

    def awaits_prompt(self, handle: int) -> bool:
        """Return whether this is an open request of this client that may be extended. It may not
        when its prompt is complete, nor when it is known to have ended in any way."""
        return self._open.awaits_prompt(handle)

    async def control(self, op: AdminOp) -> Report:
        connection, _ = self._require_core(EngineState.READY, EngineState.SLEEPING)
        answer: Answer = await self._queries.ask(lambda query: connection.send(Control(query, op)))
        if answer.report is None:
            raise RequestError(answer.message)
        if isinstance(op, Pause | Resume | Sleep | Wake):
            self._owed = [each for each in self._owed if isinstance(each.op, LoadWeights)]
        return answer.report

    def control_later(self, op: AdminOp) -> None:
        """Have the engine carry out an operation as soon as it can, if it has a core or when it
        gets one, behind others that it is to do later. Its answer is ignored."""
        known = {id(each.op): each for each in self._owed if each.op is not op}
        wanted = _with_later([each.op for each in self._owed], op)
        self._owed = [known.get(id(each)) or self._new_owed(each) for each in wanted]
        if self._connection is not None and self._watch.instance is not None:
            for each in self._owed:
                if id(each.op) not in known:
                    self._connection.send(each)

    def _new_owed(self, op: AdminOp) -> Control:
        self._num_owed += 1
        return Control(NO_QUERY - self._num_owed, op)

    @property
    def directories(self) -> tuple[Path, ...]:
        return (self._directory,)

    @property
    def status(self) -> EngineStatus:
        return self._watch.status

    @property
    def stats(self) -> EngineStats:
        stats = self._watch.stats
        num_garbled = stats.garbled_messages_total + self._num_garbled
        return replace(stats, garbled_messages_total=num_garbled)

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    @property
    def instance(self) -> int | None:
        """Return the number of the core that is connected, None without one."""
        return self._watch.instance

    @property
    def is_settled(self) -> bool:
        """Return whether the core has carried out what was asked of it before it came."""
        return self._watch.instance is not None and not (self._owed or self._must_replay)

    @property
    def tokens_in_flight(self) -> int:
        """See `OpenRequests.tokens_in_flight`."""
        return self._open.tokens_in_flight

    def let_go(self) -> list[RequestStream]:
        """In `on_core_lost`: the streams that another client may take over."""
        return self._open.let_go()

    @property
    def is_stuck(self) -> bool:
        """See `EngineWatch.is_stuck`."""
        return self._watch.is_stuck

    def let_waiting_go(self) -> list[RequestStream]:
        """Let streams that have had no token go on with another client, as this core is stuck; it
        forgets them when it can. What it computes goes once, and from a silent core alone, since it
        may be what stopped it."""
        instance = self._watch.instance
        if instance is None:
            return []
        in_flight = read_in_flight(self._directory, instance)
        going, in_core = self._open.let_waiting_go(in_flight, is_silent=self._watch.is_silent)
        self._send_abort(in_core)
        return going

    def take_over(self, stream: RequestStream) -> None:
        """Go on with a stream of another client. EngineUnavailableError unless READY."""
        connection, _ = self._require_core(EngineState.READY)
        for request in self._open.take_over(stream, self._send_abort):
            self._send_again(connection, request)

    async def wait_for_change(self, status: EngineStatus) -> EngineStatus:
        return await self._watch.wait_for_change(status)

    async def drain(self, timeout_s: float) -> None:
        self._watch.draining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._became_idle.clear()
                    await self._became_idle.wait()
        self._end_all(f"{CLOSED} and this request was not finished in {timeout_s:g} s")

    async def close(self) -> None:
        self.engine_died(CLOSED)
        if self._context.closed:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connection is not None:
            self._connection.close(say_goodbye=self._watch.instance is not None)
        self._context.term()

    def engine_died(self, message: str) -> None:
        """Tell the client that no core will come any more; its streams fail at once."""
        self._watch.died(message)
        self._end_all(message)

    # --- the connection -------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        """Connect to core after core. After a message that cannot be used, the client does not
        trust what the core has of it: it connects again and replays its requests, as if the core
        had died."""
        num_failures = 0
        while True:
            connection = self._connection = CoreConnection(
                self._context,
                self._directory,
                self._client_id,
                on_message=self._take,
                on_pause=self._open.announce,
            )
            failure = await _failure_of(connection)
            num_failures = 0 if self._watch.instance is not None else num_failures + 1
            self._connection = None
            connection.close(say_goodbye=False)
            self._core_lost()
            if failure is None:
                num_failures = 0
                continue
            self._num_garbled += 1
            logger.error("a message of the engine core cannot be used", exc_info=failure)
            if num_failures == MAX_FAILED_GREETINGS:
                raise failure
            await asyncio.sleep(CONNECT_AGAIN_S)

    async def _follow_heartbeats(self) -> None:
        async for beat in heartbeats(self._context, self._directory, self._silence_s):
            self._watch.beat(beat)
            if self._connection is not None:  # another client may have woken it up
                self._replay(self._connection)
            if self.on_beat is not None:
                self.on_beat()

    def _take(self, message: CoreMessage) -> None:
        assert self._connection is not None, "messages come over a connection"
        if isinstance(message, Output):
            self._open.take(message.output)
        elif isinstance(message, Refused):
            self._open.refuse(message.first_handle, message.message)
        elif isinstance(message, Welcome):
            self._greeted(self._connection, message)
        elif isinstance(message, Rejected):
            self._rejected(message)
        elif isinstance(message, Answer):
            self._answered(self._connection, message)
        else:
            assert isinstance(message, Probe), "it needs no answer"
        for request in self._open.next_trial():
            self._send_again(self._connection, request)
        self._check_idle()

    def _greeted(self, connection: CoreConnection, welcome: Welcome) -> None:
        if self._restart_deadline is not None:
            self._restart_deadline.cancel()
        self._watch.connected(welcome)
        self._must_replay = True
        for owed in self._owed:
            connection.send(owed)
        self._replay(connection)

    def _answered(self, connection: CoreConnection, message: Answer) -> None:
        if message.report is not None:
            self._watch.answered(message.state_version, message.report.sleep_level)
        self._owed = [owed for owed in self._owed if owed.query != message.query]
        self._queries.answer(message.query, message)
        self._replay(connection)

    def _replay(self, connection: CoreConnection) -> None:
        """Send the new core the requests of the one before it. They wait here while it sleeps, or
        may be about to."""
        if not self._must_replay or self._owed or self._watch.sleep_level:
            return
        self._must_replay = False
        requests = self._open.core_started()
        if requests:
            logger.info("replaying %d requests to the new engine core", len(requests))
        for request in requests:
            self._send_again(connection, request)

    def _send_again(self, connection: CoreConnection, request: EngineRequest) -> None:
        """A request that another core had."""
        self._send_media(connection, request)
        connection.send(Add(request))

    def _send_media(self, connection: CoreConnection, request: EngineRequest) -> None:
        """Send the media of a request that the core lacks: a core that had them may have died."""
        for handle in {each.span.handle for each in request.media} - self._media_in_core:
            if handle in self._media:
                connection.send(PutMedia(NO_QUERY, handle, self._media[handle]))
                self._media_in_core.add(handle)

    def _rejected(self, message: Rejected) -> None:
        logger.error("the engine core rejected this process: %s", message.message)
        self.engine_died(message.message)

    def _core_lost(self) -> None:
        instance = self._watch.instance
        if instance is None:
            return  # it went before it had anything of ours
        self._watch.disconnected()
        self._must_replay = False
        self._media_in_core.clear()
        self._queries.fail_all("the engine died before it answered: try again later")
        self._open.core_died(read_in_flight(self._directory, instance))
        if self.on_core_lost is not None:
            self.on_core_lost()
        logger.warning(
            "the engine core is gone; %d requests wait for the next one", len(self._open)
        )
        loop = asyncio.get_running_loop()
        self._restart_deadline = loop.call_later(
            self._restart_timeout_s, self._end_all, self._not_back
        )
        self._check_idle()

    @property
    def _not_back(self) -> str:
        return f"the engine died and did not come back in {self._restart_timeout_s:g} s"

    def _send_abort(self, handles: list[int]) -> None:
        if handles and self._connection is not None and self._watch.instance is not None:
            self._connection.send(Abort(handles))
        self._check_idle()

    # --- small parts ----------------------------------------------------------------------------

    def _require_core(self, *states: EngineState) -> tuple[CoreConnection, EngineCapacity]:
        """The connection, in one of these states. EngineUnavailableError in another one."""
        status, connection = self.status, self._connection
        if status.state not in states or connection is None or status.capacity is None:
            advice = "start it again" if status.state is EngineState.DEAD else "try again later"
            raise EngineUnavailableError(f"{status.message or status.state}: {advice}")
        return connection, status.capacity

    def _encoded(self, request: EngineRequest) -> bytes:
        data = encode(Add(request))
        self._check_size(len(data))
        return data

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_message_bytes:
            raise RequestError(
                f"the request takes {num_bytes} bytes, but {self._max_message_bytes} may be sent "
                "to the engine: shorten the prompt"
            )

    def _end_all(self, message: str) -> None:
        self._queries.fail_all(message)
        self._open.fail_all(message)
        self._check_idle()

    def _check_idle(self) -> None:
        if not self._open:
            self._became_idle.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail all streams if one of the endless tasks ends with an error."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the client of the engine core failed", exc_info=error)
            self.engine_died(f"the connection to the engine failed: {error!r}")


async def _failure_of(connection: CoreConnection) -> Exception | None:
    """Return the error that ended a connection; None if its core is gone."""
    try:
        await connection.run()
    except Exception as error:  # noqa: BLE001  whatever it is, streams must go on
        return error
    return None


def _without_text(request: EngineRequest) -> EngineRequest:
    """The core needs token ids alone. RequestError for what cannot leave this process."""
    params = request.params
    if params.logits_processors:
        raise RequestError(
            "logits_processors are functions of this process, which the engine in another one "
            "cannot call: use logit_bias or allowed_token_ids, or an engine in this process (LLM)"
        )
    if not (params.stop or params.bad_words):
        return request
    return replace(request, params=replace(params, stop=None, bad_words=None))


def _with_later(owed: Sequence[AdminOp], op: AdminOp) -> list[AdminOp]:
    """Return what leaves an engine as `owed` and then `op` would, whether it sleeps before or
    not. Weights come before all else, since an engine that sleeps takes none, and then pins that
    are let go."""
    weights = [each for each in owed if isinstance(each, LoadWeights)]
    if isinstance(op, LoadWeights):
        return [op, *(each for each in owed if each not in weights)]
    if weights:
        return [*weights, *_with_later([each for each in owed if each not in weights], op)]
    unpins = [each for each in owed if isinstance(each, Unpin)]
    if isinstance(op, Unpin):
        return [*unpins, op, *(each for each in owed if each not in unpins)]
    if unpins:
        return [*unpins, *_with_later([each for each in owed if each not in unpins], op)]
    if isinstance(op, Sleep):
        return [op]
    if isinstance(op, Wake):
        if any(isinstance(each, Sleep) for each in owed):
            return [op, Resume()]  # waking from a sleep ends a pause, other waking nothing
        return list(owed) if any(isinstance(each, Wake) for each in owed) else [*owed, op]
    kept = list(owed)
    while kept and isinstance(kept[-1], Pause | Resume):
        kept.pop()
    return [*kept, op]
