"""`quire run-batch`: starts an engine, answers a file of requests, ends the engine."""

from __future__ import annotations

import asyncio
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire.base.errors import EngineError
from quire.base.platform.outputs import check_output
from quire.config.settings import EngineSettings
from quire.engine.supervision.host import host_engine
from quire.engine.supervision.supervisor import EngineSupervisor
from quire.protocol.status import EngineState
from quire.server.app import create_app
from quire.server.batches.runner import BESIDE, BatchCounts, BatchFiles, BatchRunner, LineRules
from quire.server.generation.backend import Backend
from quire.server.generation.served_model import core_settings, load_served_model
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings

__all__ = ["BATCH_LIMITS", "run_batch"]

PATIENT_S = 30 * 86_400.0
"""Time limits in seconds are out of reach, since no client waits for the answers."""

BATCH_LIMITS = Limits(
    max_queue_s=PATIENT_S,
    first_token_timeout_s=PATIENT_S,
    total_timeout_s=PATIENT_S,
    render_timeout_s=PATIENT_S,
    max_queue_requests=2**31,
    max_queue_tokens=2**62,
)
"""Limits of a batch run. The runner bounds the open lines, each line is a request of its own, and
none may be dropped."""


def run_batch(
    engine: EngineSettings,
    source: Path,
    target: Path,
    named: ServerSettings,
    *,
    make_supervisor: Callable[..., EngineSupervisor] = EngineSupervisor,
) -> BatchCounts:
    """Answer the requests of a file.

    named: settings with the adapters that requests may name. Raises ConfigError if a file is wrong
    or the engine cannot start with these settings, EngineError if the engine ends for good. On
    KeyboardInterrupt the answers so far are kept for the next run, unless the target is a pipe or a
    device, which gets them all at the end. make_supervisor: see `host_engine`.
    """
    server = replace(named, limits=BATCH_LIMITS, disable_log_stats=True)
    output = check_output("The file of answers", target, [source], beside=BESIDE)

    def answer(place: Path) -> BatchCounts:
        return asyncio.run(_run(engine, server, source, place, make_supervisor))

    if not output.is_stream:
        return answer(output.path)
    with tempfile.TemporaryDirectory(prefix="quire-batch-") as folder:
        whole = Path(folder) / "answers.jsonl"
        counts = answer(whole)
        _send(whole, output.path)
    return counts


def _send(whole: Path, stream: Path) -> None:
    """Write the answers to a pipe or a device. Raises EngineError if it takes them no more."""
    try:
        with whole.open("rb") as source, stream.open("wb") as target:
            shutil.copyfileobj(source, target)
    except OSError as error:
        raise EngineError(
            f"The answers cannot be written to {stream} ({error.strerror}). Give a file instead."
        ) from error


def _advance(bar: tqdm[Any]) -> None:
    bar.update()


async def _run(
    engine: EngineSettings,
    server: ServerSettings,
    source: Path,
    target: Path,
    make_supervisor: Callable[..., EngineSupervisor],
) -> BatchCounts:
    backend = Backend()
    app = create_app(server, backend)
    files, rules = BatchFiles(source, target), LineRules(server.limits.max_body_bytes)
    new_runner = functools.partial(BatchRunner, app, backend, files, rules)
    num_lines = new_runner(max_together=1).num_lines  # before the engine starts
    async with host_engine(core_settings(engine), make_supervisor=make_supervisor) as host:
        backend.serve(host.client)
        backend.set_model(await asyncio.to_thread(load_served_model, engine, server))
        status = host.client.status
        while status.state is EngineState.STARTING and not host.supervision.done():
            status = await host.client.wait_for_change(status)
        if status.capacity is None:
            await host.supervision  # raises the error that ended it
            raise EngineError(f"The engine did not start: {status.message}.")
        together = 2 * status.capacity.max_num_seqs
        bar = tqdm(total=num_lines, unit="request", file=sys.stderr, disable=None)
        with bar:
            return await new_runner(max_together=together).run(lambda: _advance(bar))
