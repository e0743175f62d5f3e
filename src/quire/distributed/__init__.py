"""What the ranks of one model exchange."""

from quire.distributed.collectives import ALONE, Alone, Collectives

__all__ = ["ALONE", "Alone", "Collectives"]
