"""The parts of the server, put together once."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import chain
from math import ceil
from pathlib import Path

from starlette.requests import Request

from quire.base.errors import EngineError
from quire.protocol.scheduling_params import SchedulingParams
from quire.protocol.status import EngineState
from quire.server.batches.store import BatchStore
from quire.server.generation.backend import Backend, Ready
from quire.server.generation.inquiry import Findings, Inquiry
from quire.server.generation.kept_images import KeptImages, NamedImages
from quire.server.generation.open_images import OpenImages
from quire.server.generation.prompts import PromptRenderer
from quire.server.generation.receipts import ReceiptStore
from quire.server.generation.service import GenerationService, RequestRecords
from quire.server.generation.vectors import VectorService
from quire.server.generation.waiting import Party, WaitingRoom
from quire.server.http.body import BodyReader
from quire.server.http.gate import ApiKeys
from quire.server.openai.job import Job, tenant_salt
from quire.server.openai.logprobs import LogprobsBudget
from quire.server.openai.sampling import chat_params, check_label
from quire.server.openai.tools import answer_form, asked_tools
from quire.server.openai.vectors import VectorJob
from quire.server.readings.front_board import FrontBoard, FrontReading
from quire.server.readings.metrics import ServerMetrics
from quire.server.readings.page_recorder import PageRecorder
from quire.server.readings.prompt_memory import PromptMemory
from quire.server.readings.span_exporter import SpanExporter, collector_of
from quire.server.readings.spans import request_spans
from quire.server.readings.timeline import Timeline, TimelineLog
from quire.server.readings.trace_recorder import TraceRecorder
from quire.server.requests.bodies import ChatRequest, GenerationRequest
from quire.server.requests.errors import RefusedError
from quire.server.requests.pooling_bodies import Pooled
from quire.server.responses.background import BackgroundRuns
from quire.server.responses.store import ResponseStore
from quire.server.routes.live import EngineLook
from quire.server.sessions.kept import KeptSessions
from quire.server.sessions.pins import SessionPins
from quire.server.sessions.store import SessionStore
from quire.server.sessions.turn import SessionTurn
from quire.server.settings import ServerSettings

__all__ = ["Services"]

logger = logging.getLogger("quire.server")

_NEVER_LOGGED = (
    "prompt", "messages", "prediction", "documents", "tools", "chat_template",
    "chat_template_kwargs", "cache_salt",
)  # fmt: skip

POLL_S = 0.02
"""Between looks for an engine that starts."""

_ENDS = "the server is shutting down"
"""Start of the message of a closed engine client."""


class Services:
    """Objects that routes share."""

    def __init__(
        self, settings: ServerSettings, backend: Backend, board: FrontBoard | None, front: int
    ) -> None:
        """board: None if there is a single front. front: its number on the board."""
        limits = settings.limits
        self._board, self._front = board, front
        self.name = f"front {front}" if front else "server"
        self.settings = settings
        self.backend = backend
        self.metrics = ServerMetrics()
        self.timelines = TimelineLog(settings.num_kept_timelines)
        memory = PromptMemory(settings.num_kept_timelines)
        self.inquiry = Inquiry(backend, memory)
        self.look = EngineLook()
        self.started_at = round(time.time(), 3)
        self.waiting = WaitingRoom(limits, num_fronts=settings.api_server_count)
        self.bodies = BodyReader(limits)
        shared = None if board is None else board.directory / "images.sqlite"
        self.named_images = NamedImages(limits, shared)
        self.prompts = PromptRenderer(
            limits,
            settings.render_threads,
            KeptImages(self.named_images, self.path_of_file),
            trust_templates=settings.trust_request_chat_template,
        )
        self._vectors = VectorService(self.metrics, self.waiting)
        shared = None if board is None else board.directory / "responses.sqlite"
        self.responses = ResponseStore(limits, shared)
        shared = None if board is None else board.directory / "receipts.sqlite"
        self.receipts = ReceiptStore(limits, shared, settings.receipt_key)
        shared = None if board is None else board.directory / "sessions.sqlite"
        self.sessions = SessionStore(limits, shared)
        self.session_pins = SessionPins(self.sessions, backend)
        self.kept_sessions = KeptSessions(self.sessions)
        most = limits.requests_per_key(len(settings.api_key))
        self.background = BackgroundRuns(
            self.responses,
            limits.max_background_responses,
            most and ceil(most / settings.api_server_count),
        )
        self._recorder = TraceRecorder(settings.record_trace)
        collector = collector_of(settings.otlp_traces_endpoint, os.environ)
        self.spans = None if collector is None else SpanExporter(collector)
        self._telling: set[asyncio.Task[None]] = set()
        self.page_recorder = PageRecorder("" if front else settings.record_ui)
        folder = settings.data_dir
        self.batches = (
            None
            if folder is None
            else BatchStore(Path(folder), limits, tenants=ApiKeys(settings.api_key).names)
        )
        self._generations = GenerationService(
            limits,
            self.metrics,
            self.waiting,
            self.prompts,
            OpenImages(settings.api_server_count),
            RequestRecords(self._recorder, memory, self.receipts),
        )

    def files(self) -> BatchStore:
        """Return the store of files and batches. Raises RefusedError 404 without one."""
        if self.batches is None:
            raise RefusedError(
                "This server keeps no files. Start it with --data-dir FOLDER.", status=404
            )
        return self.batches

    def path_of_file(self, file_id: str, tenant: str) -> Path:
        """Return the path of a caller's file. Raises RefusedError 404 if there is none."""
        files = self.files()
        return files.path(files.find_file(file_id, tenant).id)

    def ready(self) -> Ready:
        """Return the engine. Raises RefusedError 503 while it takes no requests, or too many wait
        for it."""
        ready = self.backend.require()
        self.waiting.set_capacity(ready.capacity.max_model_len, ready.capacity.max_num_seqs)
        self.waiting.check()
        return ready

    def job(
        self,
        ready: Ready,
        request: Request,
        body: GenerationRequest,
        timeline: Timeline,
        *,
        num_together: int = 1,
    ) -> Job:
        """Return the job of an answer to this request, which has num_together prompts."""
        adapter = ready.model.adapter_of(body.model)
        if self.settings.enable_log_requests:
            logger.info("Received request %s: params: %s", timeline.request_id, _parameters(body))
        return Job(
            ready=ready,
            prompts=self.prompts,
            generations=self._generations,
            logprobs_budget=LogprobsBudget(self.settings.limits.max_logprobs_bytes),
            max_beam_width=self.settings.limits.max_beam_width,
            timeline=timeline,
            tenant=request.state.tenant,
            weight=request.state.weight,
            always_usage=self.settings.enable_force_include_usage,
            adapter=adapter,
            is_spare=request.state.is_spare,
            session=self._session(request, body),
            party=Party(num_together, is_spare=request.state.is_spare),
        )

    def _session(self, request: Request, body: GenerationRequest) -> SessionTurn | None:
        """Return the conversation that a chat continues. Raises RefusedError for a request that has
        no next turn."""
        if not isinstance(body, ChatRequest) or body.session_id is None:
            return None
        self._check_session_id(body.session_id)
        others = {
            "n": (body.n or 1) > 1,
            "use_beam_search": bool(body.use_beam_search),
            "continue_final_message": bool(body.continue_final_message),
            "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
        }
        for name in (name for name, is_given in others.items() if is_given):
            raise RefusedError(
                f"{name} is given with session_id, but a conversation goes on after one whole "
                "answer. Leave it out.",
                param=name,
            )
        tenant = request.state.tenant
        return SessionTurn(
            self.sessions,
            self.session_pins,
            body.session_id,
            tenant=tenant,
            weight=request.state.weight,
            salt=tenant_salt(tenant, body.cache_salt),
        )

    def _check_session_id(self, session_id: str) -> None:
        check_label("session_id", session_id, self.settings.limits)
        if not session_id:
            raise RefusedError("session_id is empty. Give a name.", param="session_id")
        if session_id.endswith("/"):  # as a path it would be that of another conversation
            raise RefusedError(
                "session_id ends with a slash. Give a name without it.", param="session_id"
            )

    def vector_job(
        self, ready: Ready, request: Request, body: Pooled, timeline: Timeline
    ) -> VectorJob:
        """Return the job of a request for vectors. Raises RefusedError for a model that has
        none."""
        if ready.model.adapter_of(body.model) is not None:
            raise RefusedError("Adapters give no vectors. Name the model itself.", param="model")
        tenant, weight = request.state.tenant, request.state.weight
        return VectorJob(
            ready,
            self.prompts,
            self._vectors,
            timeline,
            SchedulingParams(body.priority or 0, None, tenant, weight, request.state.is_spare),
            tenant_salt(tenant, body.cache_salt),
            body.add_special_tokens is not False,
        )

    async def count_chat(self, ready: Ready, body: ChatRequest, tenant: str) -> int:
        """Return the number of tokens of a chat's prompt. Raises RefusedError for a chat that could
        not be asked for."""
        chat_params(body, ready.model.front.default_sampling, self.settings.limits)
        SchedulingParams(body.priority or 0, body.deadline_s)
        if body.session_id is not None:
            self._check_session_id(body.session_id)
        form = answer_form(asked_tools(body), body, ready.model)
        prompt = await self.prompts.render_chat(
            ready.model.front.renderer,
            body,
            ready.capacity.max_model_len,
            ready.model.dialect,
            "" if form is None else form.tools_text,
            tenant=tenant,
        )
        return len(prompt.token_ids)

    @contextmanager
    def recorded(self, request: Request, body: GenerationRequest | Pooled) -> Generator[Timeline]:
        """Record the timeline of a request, and keep it when the request ends."""
        request_id = body.request_id or request.state.request_id
        timeline = Timeline(request_id, request.url.path, request.state.tenant)
        self.timelines.begin(timeline)
        failure = ""
        try:
            yield timeline
        except BaseException as caught:
            error = self._as_told(caught)
            refused = isinstance(error, RefusedError)
            failure = str(error.status) if refused else type(error).__name__
            timeline.error = str(error) if refused else f"{type(error).__name__}: {error}"[:200]
            if isinstance(error, asyncio.CancelledError):
                timeline.error = "The client left before the answer ended."
            if error is caught:
                raise
            raise error from caught
        finally:
            timeline.finished_s = timeline.now()
            self.timelines.end(timeline)
            spans = self.spans
            if spans is not None and not request.state.trace_context.is_sampled:
                spans = None
            if spans is not None or self.settings.enable_log_requests:
                telling = self._tell(spans, request, timeline, body, failure)
                task = asyncio.create_task(telling)
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    async def _tell(
        self,
        spans: SpanExporter | None,
        request: Request,
        timeline: Timeline,
        body: GenerationRequest | Pooled,
        failure: str,
    ) -> None:
        """Log why a request that has ended went as it did, and send its spans. spans: None if
        nobody collects them. A collector that takes none costs no inquiry."""
        is_logged, found = self.settings.enable_log_requests, Findings((), None)
        if is_logged or (spans is not None and not spans.has_failed):
            found = await self.inquiry.about(timeline)
        if is_logged:
            said = " ".join(chain(*found.sentences(timeline)))
            logger.info("Finished request %s: %s", timeline.request_id, " ".join(said.split()))
        if spans is not None:
            names = () if self.backend.model is None else self.backend.model.names
            is_adapter = not failure and body.model is not None and body.model not in names
            model = body.model if is_adapter and body.model is not None else "".join(names[:1])
            context, kind = request.state.trace_context, self.settings.otlp_names
            spans.put(
                request_spans(
                    context, timeline, body, model, failure, kind, found.facts, found.verdict
                )
            )

    def show(self) -> None:
        """Write this front's reading for the others, once it serves."""
        if self._board is not None and self.backend.status.state is not EngineState.STARTING:
            self._board.write(self._front, self._reading())

    def total(self) -> FrontReading:
        """Return the sum of all fronts' readings; those of others are up to a tick old."""
        own = self._reading()
        return own if self._board is None else self._board.total(own, self._front)

    def _reading(self) -> FrontReading:
        waiting = self.waiting
        return FrontReading(
            self.metrics,
            waiting.num_requests,
            waiting.num_tokens,
            dict(waiting.refused),
            *(() if self.spans is None else self.spans.counts),
        )

    def _as_told(self, error: BaseException) -> BaseException:
        """Return the error that clients get. While the server ends, a lost engine is no fault of
        the server but a 503."""
        if self.backend.is_draining and isinstance(error, EngineError):
            reason = str(error)
            if not reason.startswith(_ENDS):
                reason = f"{_ENDS} ({reason})"
            return RefusedError(
                f"{reason[0].upper()}{reason[1:]}. Send the request again when a server is back "
                "at this address.",
                status=503,
                retry_after_s=1,
            )
        return error

    async def restore_sessions(self) -> None:
        """Bring back the sessions of an earlier server with the same K/V on disk, when the engine
        is there. Requests are taken after that (`Backend.status`)."""
        self.backend.awaits_sessions = True
        is_first = False
        try:
            while (capacity := self.backend.capacity) is None:
                await asyncio.sleep(POLL_S)
            if capacity.kv_store:
                is_first = await self.kept_sessions.open(Path(capacity.kv_store))
        finally:
            self.backend.awaits_sessions = False
        if is_first:
            await self.session_pins.restore()

    async def close(self) -> None:
        await self.session_pins.close()
        await self.kept_sessions.close()
        self.prompts.close()
        self._recorder.close()
        await asyncio.gather(*self._telling)
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)
        self.page_recorder.close()
        self.background.close()
        self.responses.close()
        self.named_images.close()
        self.receipts.close()
        self.sessions.close()
        if self.batches is not None:
            self.batches.close()


def _parameters(body: GenerationRequest) -> dict[str, object]:
    """Return the request's parameters, without the prompt and its possible parts."""
    names = (name for name in body.__struct_fields__ if name not in _NEVER_LOGGED)
    return {name: value for name in names if (value := getattr(body, name)) is not None}
