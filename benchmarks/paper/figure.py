"""A figure of the paper, and its headlines beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from quire.entrypoints.simulator import figure
from quire.entrypoints.simulator.figure import Panel, Series

__all__ = ["Figure", "Finding", "Panel", "Series"]

TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Finding:
    """One headline. low, high: the range that the paper gives, None where it gives no bound. why:
    explanation of the difference, "" if there is none to explain."""

    name: str
    ours: float
    low: float | None = None
    high: float | None = None
    unit: str = ""
    why: str = ""

    @property
    def is_near(self) -> bool:
        """Return whether it lies in the paper's range or within 15 % of it."""
        above = self.low is None or self.ours >= self.low * (1 - TOLERANCE)
        return above and (self.high is None or self.ours <= self.high * (1 + TOLERANCE))

    @property
    def paper(self) -> str:
        """The paper's range in words."""
        if self.low is None and self.high is None:
            return "–"
        if self.low == self.high:
            return f"{self.low:g}{self.unit}"
        if self.low is None:
            return f"at most {self.high:g}{self.unit}"
        if self.high is None:
            return f"at least {self.low:g}{self.unit}"
        return f"{self.low:g}–{self.high:g}{self.unit}"


@dataclass(frozen=True, slots=True)
class Figure(figure.Figure):
    """A drawn figure with its headlines."""

    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All that it shows."""
        findings = [
            {**asdict(each), "paper": each.paper, "is_near": each.is_near} for each in self.findings
        ]
        panels = [asdict(panel) for panel in self.panels]
        return {"key": self.key, "title": self.title, "findings": findings, "panels": panels}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figure:
        """Return the figure of which `as_json` gave these data."""
        names = [each.name for each in fields(Finding)]
        findings = [Finding(**{name: each[name] for name in names}) for each in data["findings"]]
        panels = [
            Panel(**{**each, "series": tuple(Series(s["label"], tuple(s["x"]), tuple(s["y"]))
                                             for s in each["series"])})
            for each in data["panels"]
        ]  # fmt: skip
        return cls(data["key"], data["title"], tuple(panels), tuple(findings))
