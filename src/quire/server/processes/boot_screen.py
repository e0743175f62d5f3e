"""The boot screen of the server: phases with durations, then how to use it."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, TextIO

import quire
from quire.server.settings import ServerSettings

if TYPE_CHECKING:  # the first line is written before this is imported
    from collections.abc import Sequence

    from quire.protocol.status import EngineStatus
    from quire.text.rendering.chat_template.cache_lint import CacheRisk

__all__ = ["BootScreen"]


class BootScreen:
    """Writes plain lines, each once, so that logs and terminals read the same."""

    def __init__(self, out: TextIO, settings: ServerSettings) -> None:
        self._out = out
        self._settings = settings
        self._started = time.monotonic()
        self._num_shown = 0

    def opened(self) -> None:
        """The port is open; all paths but the probes answer 503 until `ready`."""
        self._line(f"quire {quire.__version__} listens on {self._settings.url} and loads the model")

    def show(self, status: EngineStatus) -> None:
        """Write the finished phases that were not written yet."""
        for phase in status.phases[self._num_shown :]:
            if not phase.is_done:
                return
            self._num_shown += 1
            self._line(f"  {phase.name:<24}{phase.seconds:8.2f} s")

    def ready(
        self, status: EngineStatus, name: str, root: str, cache_risks: Sequence[CacheRisk] = ()
    ) -> None:
        """Write the capacity, and lines to copy. name, root, cache_risks: see `ServedModel`."""
        capacity, url = status.capacity, self._settings.url
        if capacity is None:
            return
        concurrency = capacity.capacity_tokens / capacity.max_model_len
        has_page = self._settings.ui and self._settings.uds is None
        self._line(
            f"  {'ready after':<24}{time.monotonic() - self._started:8.2f} s\n\n"
            f"  model     {name} ({root})\n"
            f"  engine    {capacity.description}\n"
            f"  context   {capacity.max_model_len:,} tokens\n"
            f"  KV cache  {capacity.capacity_tokens:,} tokens, "
            f"Maximum concurrency for {capacity.max_model_len:,} tokens per request: "
            f"{concurrency:.2f}x\n"
            + "".join(f"  template  {risk.name}: {risk.words}\n" for risk in cache_risks)
            + (f"  page      {url}/ui\n" if has_page else "")
        )
        self._line(self._how_to_use(url, name))
        self._line("Application startup complete.")
        self._line(f"Uvicorn running on {url} (Press CTRL+C to quit)")

    def _how_to_use(self, url: str, name: str) -> str:
        key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if self._settings.api_key else ""
        address = url
        if self._settings.uds is not None:
            key += f" --unix-socket {self._settings.uds}"
            address = "http://localhost"
        return (
            f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json'"
            f'{key} -d \'{{"model": "{name}", '
            f'"messages": [{{"role": "user", "content": "Hello!"}}]}}\'\n'
            f"  export OPENAI_BASE_URL={address}/v1"
            + ("" if self._settings.api_key else " OPENAI_API_KEY=none")
            + "\n"
        )

    def _line(self, text: str) -> None:
        # A closed output must not end the server.
        with contextlib.suppress(OSError, ValueError):
            self._out.write(text + "\n")
            self._out.flush()
