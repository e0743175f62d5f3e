"""Responses that are made in the background, without a waiting client."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from quire.server.requests.errors import RefusedError
from quire.server.responses.store import ResponseStore

__all__ = ["BackgroundRuns"]

POLL_S = 1.0


class BackgroundRuns:
    """Background runs of this front. A run ends when its response is no longer wanted; any front
    may receive the request that says so."""

    def __init__(
        self, store: ResponseStore, max_runs: int, max_runs_per_key: int | None = None
    ) -> None:
        """max_runs_per_key: None for no bound per key."""
        self._store = store
        self._max_runs = max_runs
        self._max_runs_per_key = max_runs_per_key
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._num_runs: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._runs)

    def check_room(self, tenant: str) -> None:
        """Raise RefusedError 503 if as many run as may, 429 if as many of this caller's key do."""
        most = self._max_runs_per_key
        if most is not None and self._num_runs[tenant] >= most:
            raise RefusedError(
                f"{most} responses of this API key are made in the background already "
                "(max_requests_per_key). Wait for one to end.",
                status=429,
                retry_after_s=5,
            )
        if len(self._runs) >= self._max_runs:
            raise RefusedError(
                f"{self._max_runs} responses are made in the background already "
                "(max_background_responses). Try again later.",
                status=503,
                retry_after_s=5,
            )

    def start(self, response_id: str, tenant: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which must not raise."""
        run = asyncio.create_task(self._watched(response_id, work))
        self._runs[response_id] = run
        self._num_runs[tenant] += 1

        def ended(_: asyncio.Task[None]) -> None:
            self._runs.pop(response_id, None)
            self._num_runs[tenant] -= 1
            if not self._num_runs[tenant]:
                del self._num_runs[tenant]

        run.add_done_callback(ended)

    def cancel(self, response_id: str) -> None:
        """End a run, if it is one of this front."""
        run = self._runs.get(response_id)
        if run is not None:
            run.cancel()

    def close(self) -> None:
        for run in list(self._runs.values()):
            run.cancel()

    async def _watched(self, response_id: str, work: Coroutine[Any, Any, None]) -> None:
        working = asyncio.create_task(work)
        try:
            while not working.done():
                await asyncio.wait((working,), timeout=POLL_S)
                if not self._store.is_wanted(response_id):
                    return
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
