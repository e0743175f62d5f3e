"""Which drafts an engine makes."""

from quire.config.speculation.settings import METHODS, SpeculationSettings, parse_speculation

__all__ = ["METHODS", "SpeculationSettings", "parse_speculation"]
