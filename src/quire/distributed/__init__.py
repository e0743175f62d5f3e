"""Exchange between the ranks of one model."""

from quire.distributed.collectives import ALONE, Alone, Collectives

__all__ = ["ALONE", "Alone", "Collectives"]
