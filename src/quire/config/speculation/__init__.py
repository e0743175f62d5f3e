"""Settings of drafts."""

from quire.config.speculation.settings import (
    HEADS,
    METHODS,
    MTP,
    OF_MODELS,
    SpeculationSettings,
    parse_speculation,
)

__all__ = ["HEADS", "METHODS", "MTP", "OF_MODELS", "SpeculationSettings", "parse_speculation"]
