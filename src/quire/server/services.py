"""The parts of the server, put together once."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from starlette.requests import Request

from quire.server.backend import Backend, Ready
from quire.server.body import BodyReader
from quire.server.errors import RefusedError
from quire.server.generation import GenerationService
from quire.server.job import Job
from quire.server.metrics import ServerMetrics
from quire.server.prompts import PromptRenderer
from quire.server.requests import GenerationRequest
from quire.server.settings import ServerSettings
from quire.server.timeline import Timeline, TimelineLog
from quire.server.waiting import WaitingRoom

__all__ = ["Services"]

logger = logging.getLogger("quire.server")

_NEVER_LOGGED = (
    "prompt", "messages", "documents", "chat_template", "chat_template_kwargs", "cache_salt",
)  # fmt: skip


class Services:
    """What the routes work with."""

    def __init__(self, settings: ServerSettings, backend: Backend) -> None:
        limits = settings.limits
        self.settings = settings
        self.backend = backend
        self.metrics = ServerMetrics()
        self.timelines = TimelineLog(settings.num_kept_timelines)
        self.waiting = WaitingRoom(limits)
        self.bodies = BodyReader(limits)
        self.prompts = PromptRenderer(
            limits,
            settings.render_threads,
            trust_templates=settings.trust_request_chat_template,
        )
        self._generations = GenerationService(limits, self.metrics, self.waiting)

    def ready(self) -> Ready:
        """The engine. RefusedError 503 while it takes no requests, or too many wait for it."""
        ready = self.backend.require()
        self.waiting.set_capacity(ready.capacity.max_model_len, ready.capacity.max_num_seqs)
        self.waiting.check()
        return ready

    def job(
        self, ready: Ready, request: Request, body: GenerationRequest, timeline: Timeline
    ) -> Job:
        """What an answer to this request works with."""
        ready.model.check_name(body.model)
        if self.settings.enable_log_requests:
            logger.info("Received request %s: params: %s", timeline.request_id, _parameters(body))
        return Job(
            ready=ready,
            prompts=self.prompts,
            generations=self._generations,
            limits=self.settings.limits,
            timeline=timeline,
            tenant=request.state.tenant,
            weight=request.state.weight,
            always_usage=self.settings.enable_force_include_usage,
        )

    @contextmanager
    def recorded(self, request: Request, body: GenerationRequest) -> Generator[Timeline]:
        """The timeline of a request, which is kept when it ends."""
        request_id = body.request_id or request.state.request_id
        timeline = Timeline(request_id, request.url.path)
        try:
            yield timeline
        except BaseException as error:
            refused = isinstance(error, RefusedError)
            timeline.error = str(error) if refused else f"{type(error).__name__}: {error}"[:200]
            raise
        finally:
            timeline.finished_s = timeline.now()
            self.timelines.add(timeline)

    def close(self) -> None:
        self.prompts.close()


def _parameters(body: GenerationRequest) -> dict[str, object]:
    """What was asked, without the prompt and all that may be part of it."""
    names = (name for name in body.__struct_fields__ if name not in _NEVER_LOGGED)
    return {name: value for name in names if (value := getattr(body, name)) is not None}
