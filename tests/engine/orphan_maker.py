"""A front that starts a fake core, prints the core's pid and its directory, and waits to be killed.

`test_process_client.py` forks it from what a fake core imports, as this forks its core.
"""

from __future__ import annotations

import asyncio

from tests.engine import process_harness
from tests.engine.process_harness import ask, hosted, run
from tests.forked import OwnTemplate


async def _work() -> None:
    async with hosted() as host:
        stream = await ask(host.client, [1], max_tokens=200)
        await anext(stream)
        print(host.supervisor.pid, host.directory, flush=True)  # noqa: T201
        await asyncio.sleep(3600)


def main() -> int:
    template = OwnTemplate()
    process_harness.template_of = lambda _: template  # type: ignore[assignment]
    run(_work(), 3600)
    return 0
