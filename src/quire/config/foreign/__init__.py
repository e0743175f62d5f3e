"""Settings of other engines that have no counterpart here, or another name."""

from quire.config.foreign.engine import ALIASES, FOREIGN_SETTINGS, SPELLINGS

__all__ = ["ALIASES", "FOREIGN_SETTINGS", "SPELLINGS"]
