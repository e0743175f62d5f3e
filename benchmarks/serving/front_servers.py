"""The two servers that `front.py` compares, each in a process of its own: ours over an engine that
costs nothing, and a FastAPI application of a few lines that sends chunks of the same shape.

    python -m benchmarks.serving.front_servers quire|fastapi     prints its port, serves until ended
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from quire.base.telemetry import EngineStats
from quire.bundled import bundled_model_path
from quire.config.families.reader import read_model_spec
from quire.config.settings import EngineSettings
from quire.engine.clients.open_requests import OpenRequests
from quire.engine.clients.request_stream import RequestStream
from quire.engine.model_front import load_model_front
from quire.protocol.request import EngineOutput, EngineRequest, FinishReason, SequenceFinish
from quire.protocol.status import EngineCapacity, EngineState, EngineStatus
from quire.server.app import create_app
from quire.server.generation.backend import Backend, ServedModel
from quire.server.http.server import uvicorn_config
from quire.server.settings import ServerSettings

MODEL = "bundled"
ANSWER = " A gathering of pages is a quire; an engine serves many of them at the same time."
"""Text of every answer, over and over."""


class EchoEngine:
    """`AsyncEngineClient` without an engine: steps cost nothing, and each gives one token of ANSWER
    to every open sequence. From there on everything is as in `ProcessEngineClient`."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._next_handle = 0
        self._open = OpenRequests(self.reserve_handles, max_replays=0)
        self._left: dict[int, int] = {}  # by handle: tokens to come
        self._stepping: asyncio.Task[None] | None = None
        capacity = EngineCapacity(
            max_model_len=2048, max_num_seqs=1024, max_num_batched_tokens=8192, block_size=16,
            num_blocks=131_072, capacity_tokens=2_097_152, groups=((None, 16),),
            uses_priority=False,
        )  # fmt: skip
        self.status = EngineStatus(EngineState.READY, capacity=capacity)
        self.stats = EngineStats()

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    def reserve_handles(self, count: int) -> int:
        self._next_handle += count
        return self._next_handle - count

    async def add(self, request: EngineRequest) -> RequestStream:
        stream = self._open.open(request, self._forget)
        handles = range(request.first_handle, request.first_handle + request.params.n)
        self._left.update(dict.fromkeys(handles, request.params.max_tokens or 1))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        return stream

    async def _step_until_idle(self) -> None:
        while self._left:
            await asyncio.sleep(0)
            self._step()

    def _step(self) -> None:
        handles = np.array(list(self._left), np.int64)
        texts = self._token_ids
        token_ids = np.array([texts[left % len(texts)] for left in self._left.values()], np.int32)
        finished: list[SequenceFinish] = []
        for handle in list(self._left):
            self._left[handle] -= 1
            if self._left[handle] == 0:
                del self._left[handle]
                finished.append(SequenceFinish(handle, FinishReason.LENGTH))
        self._open.take(EngineOutput(handles, token_ids, finished=tuple(finished)))
        self._open.announce()

    def _forget(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self._left.pop(handle, None)

    def abort(self, handles: Iterable[int]) -> None:
        self._open.abort(handles)

    async def wait_for_change(self, status: EngineStatus) -> EngineStatus:
        return await asyncio.get_running_loop().create_future() or status

    async def drain(self, timeout_s: float) -> None:
        pass

    async def close(self) -> None:
        self._open.fail_all("the server is shutting down")


def quire_server() -> uvicorn.Config:
    """Return the server of `quire serve`, except for the engine."""
    folder = bundled_model_path()
    front = load_model_front(EngineSettings(), folder, read_model_spec(folder))
    token_ids = front.renderer.render_prompt(ANSWER, add_special_tokens=False).token_ids
    settings = ServerSettings(disable_access_log=True, disable_log_stats=True)
    backend = Backend()
    backend.serve(EchoEngine(token_ids))
    backend.set_model(ServedModel((MODEL,), MODEL, int(time.time()), front))
    return uvicorn_config(create_app(settings, backend), settings)


class CompletionBody(BaseModel):
    model: str
    prompt: list[int] | str
    max_tokens: int = 16
    temperature: float = 1.0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None


def fastapi_server() -> uvicorn.Config:
    """Checks the body, then sends a word per chunk: no tokenizer, no text to assemble, no limits,
    no metrics."""
    words = [f" {word}" for word in ANSWER.split()]
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(body: CompletionBody) -> StreamingResponse:
        return StreamingResponse(chunks(body), media_type="text/event-stream")

    async def chunks(body: CompletionBody) -> AsyncIterator[str]:
        common = {
            "id": "cmpl-0123456789abcdef", "object": "text_completion",
            "created": int(time.time()), "model": body.model,
        }  # fmt: skip
        for index in range(body.max_tokens):
            await asyncio.sleep(0)
            ends = "length" if index == body.max_tokens - 1 else None
            choice = {
                "index": 0, "text": words[index % len(words)], "logprobs": None,
                "finish_reason": ends,
            }  # fmt: skip
            yield f"data: {json.dumps({**common, 'choices': [choice]})}\n\n"
        usage = {"prompt_tokens": len(body.prompt), "completion_tokens": body.max_tokens}
        yield f"data: {json.dumps({**common, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    return uvicorn.Config(app, log_level="warning", access_log=False)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = {"quire": quire_server, "fastapi": fastapi_server}[sys.argv[1]]()
    gc.collect()
    gc.freeze()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
