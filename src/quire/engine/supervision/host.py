"""An engine in a process of its own, as one thing: directory, supervisor and client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.base.platform import detect_platform
from quire.base.telemetry.flight.dump import DumpFolder, collect, user_folder
from quire.config.settings import EngineSettings
from quire.engine.clients.open_requests import HandleCounter
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.clients.replicas import ReplicatedClient
from quire.engine.kernel_choice import Measure, choose_kernels
from quire.engine.supervision.private_directory import private_directory
from quire.engine.supervision.supervisor import EngineSupervisor, SettingValue
from quire.ops.kernel_timing import time_kernels

__all__ = ["EngineHost", "host_engine"]


_log = logging.getLogger("quire.engine")


@dataclass(frozen=True, slots=True)
class EngineHost:
    """directory: folder of the first replica, where further clients find its core. supervisors:
    supervisors of the replicas. supervision: task that ends, with an error, when no core will come
    any more. dumps: folder for dumps of the flight recorder."""

    directory: Path
    client: ProcessEngineClient | ReplicatedClient
    supervisors: tuple[EngineSupervisor, ...]
    supervision: asyncio.Task[None]
    dumps: DumpFolder

    def write_dump(self, reason: str) -> None:
        """Write what all cores have done of late, and the stacks of all processes. It takes up to a
        second; any thread may call it."""
        self.dumps.write(collect(reason, "server", self.client.directories))

    @property
    def supervisor(self) -> EngineSupervisor:
        """The one of the first replica."""
        return self.supervisors[0]


@contextlib.asynccontextmanager
async def host_engine(
    settings: Mapping[str, SettingValue],
    *,
    measure: Measure = time_kernels,
    make_supervisor: Callable[..., EngineSupervisor] = EngineSupervisor,
    make_client: Callable[..., ProcessEngineClient] = ProcessEngineClient,
    flight_dir: Path | None = None,
) -> AsyncGenerator[EngineHost]:
    """Start an engine core with these settings, or one for each replica (`data_parallel_size`), and
    leave nothing of it at the end.

    The client is there at once; its status tells how the start goes on. Each core that is started
    gets the same kernels. measure: timing used to choose them; ConfigError if a setting asks for
    kernels that cannot run here (`choose_kernels`).
    make_supervisor, make_client: their classes, or partials of them with other limits. flight_dir:
    folder for dumps of the flight recorder; None for that of the user.
    """
    dumps = DumpFolder(flight_dir or user_folder())
    chosen = await asyncio.to_thread(_with_kernels, settings, measure)
    size = int(settings.get("data_parallel_size") or 1)
    with contextlib.ExitStack() as stack:
        directories = [stack.enter_context(private_directory()) for _ in range(size)]
        handles = HandleCounter(0)
        clients = [
            make_client(each, handles=handles) if size > 1 else make_client(each)
            for each in directories
        ]
        # A core that replaces another one has its part of the memory, not of what the others left.
        free = {"free_bytes": detect_platform().free_bytes} if size > 1 else {}
        supervisors = tuple(
            make_supervisor(
                directory,
                chosen,
                on_dead=client.engine_died,
                replica=i,
                flight_dir=dumps.path,
                **free,
            )
            for i, (directory, client) in enumerate(zip(directories, clients, strict=True))
        )
        supervision = asyncio.ensure_future(_run_all(supervisors))
        client: ProcessEngineClient | ReplicatedClient = clients[0]
        if size > 1:
            has_cache = bool(chosen.get("enable_prefix_caching", True))
            client = ReplicatedClient(clients, has_cache=has_cache)
        try:
            yield EngineHost(directories[0], client, supervisors, supervision, dumps)
        finally:
            await client.close()
            await asyncio.gather(*(each.stop() for each in supervisors))
            supervision.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await supervision


async def _run_all(supervisors: Sequence[EngineSupervisor]) -> None:
    """Wait until the last one ends. Raises the first error among them."""
    ends = await asyncio.gather(*(each.run() for each in supervisors), return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end


def _with_kernels(
    settings: Mapping[str, SettingValue], measure: Measure
) -> dict[str, SettingValue]:
    chosen = choose_kernels(EngineSettings.from_values(settings), detect_platform(), measure)
    for each in chosen.decisions:
        _log.info("%s %s: %s", each.name, each.value, each.reason)
    return {**settings, **{each.name: each.value for each in chosen.decisions}}
