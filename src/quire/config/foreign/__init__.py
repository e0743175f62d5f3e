"""Settings of other engines that have no counterpart here."""

from quire.config.foreign.engine import FOREIGN_SETTINGS

__all__ = ["FOREIGN_SETTINGS"]
