"""Settings of drafts."""

from quire.config.speculation.settings import (
    HEADS,
    METHODS,
    OF_MODELS,
    SpeculationSettings,
    parse_speculation,
)

__all__ = ["HEADS", "METHODS", "OF_MODELS", "SpeculationSettings", "parse_speculation"]
