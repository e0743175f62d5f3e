"""A front that starts a fake core, prints the core's pid and its directory, and waits to be killed.

Run by `test_process_client.py`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.engine.process_harness import ask, hosted, run  # noqa: E402


async def _work() -> None:
    async with hosted() as host:
        stream = await ask(host.client, [1], max_tokens=200)
        await anext(stream)
        print(host.supervisor.pid, host.directory, flush=True)  # noqa: T201
        await asyncio.sleep(3600)


if __name__ == "__main__":
    run(_work(), 3600)
