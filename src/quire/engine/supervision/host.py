"""An engine in a process of its own, as one thing: directory, supervisor and client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.config.settings import EngineSettings
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.kernel_choice import Measure, choose_kernels
from quire.engine.supervision.private_directory import private_directory
from quire.engine.supervision.supervisor import EngineSupervisor, SettingValue
from quire.ops.kernel_timing import time_kernels
from quire.platform import detect_platform

__all__ = ["EngineHost", "host_engine"]


_log = logging.getLogger("quire.engine")


@dataclass(frozen=True, slots=True)
class EngineHost:
    """directory: in which further clients find the core. supervision: ends, with an error, when no
    core will come any more."""

    directory: Path
    client: ProcessEngineClient
    supervisor: EngineSupervisor
    supervision: asyncio.Task[None]


@contextlib.asynccontextmanager
async def host_engine(
    settings: Mapping[str, SettingValue],
    *,
    measure: Measure = time_kernels,
    make_supervisor: Callable[..., EngineSupervisor] = EngineSupervisor,
    make_client: Callable[..., ProcessEngineClient] = ProcessEngineClient,
) -> AsyncGenerator[EngineHost]:
    """Start an engine core with these settings, and leave nothing of it at the end.

    The client is there at once; its status tells how the start goes on. Each core that is started
    gets the same kernels. measure: by which they are chosen; ConfigError if a setting asks for some
    that cannot run here (`choose_kernels`).
    make_supervisor, make_client: their classes, or partials of them with other limits.
    """
    chosen = await asyncio.to_thread(_with_kernels, settings, measure)
    with private_directory() as directory:
        client = make_client(directory)
        supervisor = make_supervisor(directory, chosen, on_dead=client.engine_died)
        supervision = asyncio.ensure_future(supervisor.run())
        try:
            yield EngineHost(directory, client, supervisor, supervision)
        finally:
            await client.close()
            await supervisor.stop()
            supervision.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await supervision


def _with_kernels(
    settings: Mapping[str, SettingValue], measure: Measure
) -> dict[str, SettingValue]:
    chosen = choose_kernels(EngineSettings.from_values(settings), detect_platform(), measure)
    for each in chosen.decisions:
        _log.info("%s %s: %s", each.name, each.value, each.reason)
    return {**settings, **{each.name: each.value for each in chosen.decisions}}
