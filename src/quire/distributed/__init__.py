"""Exchange between the ranks of one model."""

from quire.distributed.collectives import (
    ALONE,
    Alone,
    Collectives,
    Reduction,
    as_tree,
    look_up_in_parts,
    norm_in_parts,
    together,
)
from quire.distributed.plain import PlainCollectives

__all__ = [
    "ALONE",
    "Alone",
    "Collectives",
    "PlainCollectives",
    "Reduction",
    "as_tree",
    "look_up_in_parts",
    "norm_in_parts",
    "together",
]
