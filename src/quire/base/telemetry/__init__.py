"""Counters of the engine, for metrics and logs."""

from quire.base.telemetry.engine_stats import EngineStats

__all__ = ["EngineStats"]
