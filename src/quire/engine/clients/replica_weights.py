"""New weights for several engines: all of them get them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from quire.base.errors import EngineError, EngineUnavailableError, QuireError
from quire.engine.clients.process_client import ProcessEngineClient
from quire.protocol.control import Inspect, LoadWeights, Report
from quire.protocol.status import EngineState

__all__ = ["load_everywhere"]


async def load_everywhere(replicas: Sequence[ProcessEngineClient], op: LoadWeights) -> Report:
    """Have all replicas check the files, then load them.

    Raises EngineUnavailableError unless all are ready, and the error of a replica that refuses the
    files; nothing has changed then. If one fails later, all go back to what they had, and
    EngineError says so; one that cannot at once goes back before it serves again.
    """
    for number, each in enumerate(replicas):
        if each.status.state is not EngineState.READY:
            raise EngineUnavailableError(
                f"replica {number} is {each.status.state}, and weights change in all "
                f"{len(replicas)} or in none: try again when all are ready"
            )
    befores = await _on_all(replicas, Inspect())
    checked = await _on_all(replicas, msgspec.structs.replace(op, is_trial=True))
    if op.is_trial:
        return checked[0]
    answers = await asyncio.gather(*(each.control(op) for each in replicas), return_exceptions=True)
    failed = [error for error in answers if isinstance(error, BaseException)]
    reports = [report for report in answers if isinstance(report, Report)]
    if not failed:
        return replace(
            reports[0],
            is_paused=all(report.is_paused for report in reports),
            sleep_level=min(report.sleep_level for report in reports),
        )
    late = await _go_back(replicas, befores)
    where = f"; replicas {', '.join(late)} do so before they serve again" if late else ""
    raise EngineError(
        f"a replica could not load the new weights ({failed[0]}): all {len(replicas)} go back to "
        f"version {befores[0].weights.version!r}{where}"
    ) from failed[0]


async def _on_all(
    replicas: Sequence[ProcessEngineClient], op: Inspect | LoadWeights
) -> list[Report]:
    return list(await asyncio.gather(*(each.control(op) for each in replicas)))


async def _go_back(replicas: Sequence[ProcessEngineClient], befores: Sequence[Report]) -> list[str]:
    """Have each replica load what it had. Return the numbers of those that do it later."""
    late: list[str] = []
    for number, (each, before) in enumerate(zip(replicas, befores, strict=True)):
        try:
            await each.control(before.loaded)
        except QuireError:
            each.control_later(before.loaded)
            late.append(str(number))
    return late
