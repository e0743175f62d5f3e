"""The two servers that `front.py` compares, each in a process of its own: ours over an engine that
costs nothing, and a FastAPI application of a few lines that sends chunks of the same shape.

    python benchmarks/front_servers.py quire|fastapi     prints its port, serves until ended
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, Self

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from quire.bundled import bundled_model_path
from quire.config.families import read_model_spec
from quire.config.settings import EngineSettings
from quire.engine.async_client import RequestUpdate, SampleUpdate
from quire.engine.model_front import load_model_front
from quire.protocol.request import EngineRequest, FinishReason, SequenceFinish
from quire.protocol.status import EngineCapacity, EngineState, EngineStatus
from quire.server.app import create_app
from quire.server.backend import Backend, ServedModel
from quire.server.run import uvicorn_config
from quire.server.settings import ServerSettings
from quire.telemetry import EngineStats

MODEL = "bundled"
ANSWER = " A gathering of pages is a quire; an engine serves many of them at the same time."
"""What every answer says, over and over."""


class EchoStream:
    """One token of ANSWER per update, as many as were asked for."""

    def __init__(self, request: EngineRequest, token_ids: list[int]) -> None:
        self._handle = request.first_handle
        self._left = request.params.max_tokens or 1
        self._token_ids = token_ids

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestUpdate:
        if self._left == 0:
            raise StopAsyncIteration
        await asyncio.sleep(0)  # a step is over for all streams before the next one begins
        self._left -= 1
        token = self._token_ids[self._left % len(self._token_ids)]
        finish = None if self._left else SequenceFinish(self._handle, FinishReason.LENGTH)
        return RequestUpdate([SampleUpdate(0, [token], finish=finish)])

    def abort(self, sample_index: int | None = None) -> None:
        del sample_index
        self._left = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left = 0


class EchoEngine:
    """`AsyncEngineClient` without an engine."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._next_handle = 0
        capacity = EngineCapacity(
            max_model_len=2048, max_num_seqs=1024, max_num_batched_tokens=8192, block_size=16,
            num_blocks=131_072, capacity_tokens=2_097_152,
        )  # fmt: skip
        self.status = EngineStatus(EngineState.READY, capacity=capacity)
        self.stats = EngineStats()
        self.num_unfinished = 0

    def reserve_handles(self, count: int) -> int:
        self._next_handle += count
        return self._next_handle - count

    async def add(self, request: EngineRequest) -> EchoStream:
        return EchoStream(request, self._token_ids)

    def abort(self, handles: Iterable[int]) -> None:
        pass

    async def wait_for_change(self, status: EngineStatus) -> EngineStatus:
        return await asyncio.get_running_loop().create_future() or status

    async def drain(self, timeout_s: float) -> None:
        pass

    async def close(self) -> None:
        pass


def quire_server() -> uvicorn.Config:
    """As `quire serve` has it, but for the engine."""
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
