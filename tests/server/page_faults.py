"""Faults of a page in a browser: errors of its console, requests to others, axe-core's findings."""

from __future__ import annotations

from typing import Any

__all__ = ["PageFaults", "serious_faults"]


class PageFaults:
    """Notes errors that a page writes to its console, and requests to another host."""

    def __init__(self, page: Any, url: str) -> None:
        self.found: list[str] = []
        self._url = url
        page.on("pageerror", lambda error: self.found.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self._check(request.url))

    def _note(self, message: Any) -> None:
        if message.type == "error" and "status of 4" not in message.text:
            self.found.append(message.text)

    def _check(self, asked: str) -> None:
        if not asked.startswith((f"{self._url}/", "data:", "blob:")):
            self.found.append(f"asked {asked}")

    def check(self) -> None:
        """Fail if there was any."""
        assert not self.found


def serious_faults(page: Any, axe: str) -> list[str]:
    """Return faults that axe-core calls serious or critical. axe: its source."""
    page.evaluate(axe)
    found = page.evaluate("async () => (await axe.run(document)).violations")
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:160] for node in each['nodes'][:3]]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
