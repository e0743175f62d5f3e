"""Exchange between the ranks of one model."""

from quire.ops.distributed.collectives import (
    ALONE,
    Alone,
    Collectives,
    Reduction,
    TorchCollectives,
    as_tree,
    together,
)
from quire.ops.distributed.plain import PlainCollectives

__all__ = [
    "ALONE",
    "Alone",
    "Collectives",
    "PlainCollectives",
    "Reduction",
    "TorchCollectives",
    "as_tree",
    "together",
]
