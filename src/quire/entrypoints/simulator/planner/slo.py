"""Limits of latency that a share of all requests has to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError
from quire.entrypoints.simulator.run import Served

__all__ = ["METRICS", "SLO", "parse_slo"]

METRICS: Mapping[str, str] = {
    "ttft": "time to the first token",
    "tpot": "time per token after it",
    "e2e": "time from arrival to end",
}

_UNITS = {"ms": 1e-3, "s": 1.0}
SHARE = 0.99


@dataclass(frozen=True, slots=True)
class SLO:
    """limits: seconds by metric. share: share of the requests that must keep all limits."""

    limits: Mapping[str, float]
    share: float = SHARE

    def kept(self, served: Served) -> dict[str, float]:
        """Share of the requests that keep each limit, by metric."""
        return {
            name: float((_values(served, name) <= limit).mean())
            for name, limit in self.limits.items()
        }

    def kept_all(self, served: Served) -> float:
        """Share of the requests that keep all limits."""
        keeps = [_values(served, name) <= limit for name, limit in self.limits.items()]
        return float(np.logical_and.reduce(keeps).mean())

    def strain(self, served: Served) -> float:
        """Return the largest p99 over its limit: below 1 there is room."""
        return max(
            float(np.percentile(_values(served, name), 100 * self.share)) / limit
            for name, limit in self.limits.items()
        )

    def describe(self) -> str:
        """One line."""
        limits = ", ".join(f"{name} ≤ {limit:g} s" for name, limit in self.limits.items())
        return f"{limits} for {100 * self.share:g} % of the requests"


def parse_slo(text: str) -> SLO:
    """Return limits such as "ttft=1s,tpot=50ms". ConfigError, with what there is, for others."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        unit = next((unit for unit in _UNITS if value.endswith(unit)), "")
        try:
            seconds = float(value.removesuffix(unit)) * _UNITS[unit]
        except (KeyError, ValueError):
            seconds = math.nan
        if name not in METRICS or not equals or not 0 < seconds < math.inf or name in limits:
            raise ConfigError(
                f"Limit {part.strip()!r} cannot be. Give each of {', '.join(METRICS)} once at "
                "most, with a unit: ttft=1s,tpot=50ms."
            )
        limits[name] = seconds
    return SLO(limits)


def _values(served: Served, metric: str) -> npt.NDArray[np.float64]:
    if metric == "e2e":
        return served.finished_s - served.arrival_s
    return served.ttft_s if metric == "ttft" else served.tpot_s
