"""The encoder of images beside steps: its priority, its turns, and equal tokens."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import waiting
from tests.image_oracle import SETTINGS, asked, last_tokens
from tests.image_writer import IMAGE, picture, write_vision_checkpoint

from quire import AsyncLLM, RequestError, SamplingParams
from quire.base.platform.priority import LOWEST
from quire.compute.worker.turns import SHARE

LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
NUM_STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("smolvlm"), "smolvlm")


@contextmanager
def engine_of(folder: Path) -> Iterator[tuple[AsyncLLM, Any]]:
    """An engine, and its worker."""
    with AsyncLLM(str(folder), **SETTINGS) as engine:
        client: Any = engine.engine.client
        yield engine, client._core._executor._worker


def note_steps(worker: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Return a list that gets the span of each step."""
    spans, launch = list[tuple[float, float]](), worker._assembly.runner.launch

    def noted(plan: Any) -> Any:
        started = time.perf_counter()
        step = launch(plan)
        spans.append((started, time.perf_counter()))
        return step

    monkeypatch.setattr(worker._assembly.runner, "launch", noted)
    return spans


def slow_tower(
    worker: Any, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]
) -> tuple[threading.Event, list[int]]:
    """Have the encoder work until `end` returns. Return an event that tells that it has begun, and
    a list that gets the priority of its thread."""
    begun, priorities, encode = threading.Event(), list[int](), worker._images._tower.encode

    def slow(tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        begun.set()
        end()
        return encode(tiles, dtype)

    monkeypatch.setattr(worker._images._tower, "encode", slow)
    return begun, priorities


async def streamed(engine: AsyncLLM) -> list[int]:
    found: list[int] = []
    async for output in engine.generate("text", LONG):
        found = list(output.outputs[0].token_ids)
    return found


def test_a_stream_goes_on_and_the_encoder_has_its_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when steps wait for an image, leave its encoder no time, or share their cores with
    it, and when an image beside a stream changes a token of either."""

    async def work() -> None:
        image = asked(f"See {IMAGE} now", picture(60, 40))
        with engine_of(folder) as (engine, _):
            alone = await streamed(engine), await last_tokens(engine, image)
        with engine_of(folder) as (engine, worker):
            spans = note_steps(worker, monkeypatch)
            beside: list[tuple[float, float]] = []

            def end() -> None:
                if beside:  # another tile
                    return
                first = len(spans) + 1  # one may have begun before the encoder
                waiting.wait_for(lambda: len(spans) >= first + NUM_STEPS, "steps beside")
                beside.extend(spans[first : first + NUM_STEPS])

            begun, priorities = slow_tower(worker, monkeypatch, end)
            answer = asyncio.ensure_future(last_tokens(engine, image))
            await asyncio.to_thread(begun.wait, waiting.WAIT_S)
            assert (await streamed(engine), await answer) == alone
            if sys.platform == "linux":  # elsewhere threads have no priority of their own
                assert set(priorities) == {LOWEST}
        for (started, ended), (following, _) in itertools.pairwise(beside):
            assert following - ended >= SHARE * (ended - started) - 0.0005

    asyncio.run(work())


def test_steps_do_not_wait_after_an_image_that_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a failed image fails more than its request, or keeps the encoder's turns."""

    def end() -> None:
        raise RequestError("the encoder failed")

    async def work() -> None:
        with engine_of(folder) as (engine, worker):
            begun, _ = slow_tower(worker, monkeypatch, end)
            stream = asyncio.ensure_future(streamed(engine))
            with pytest.raises(RequestError, match="the encoder failed"):
                await last_tokens(engine, asked(IMAGE, picture(60, 40)))
            assert begun.is_set()
            assert len(await stream) == LONG.max_tokens
            assert worker._turns._rests.is_set()

    asyncio.run(work())
