"""Sampling parameters: their declarations, the objects that some of them are, and names of other
engines. `quire.protocol.sampling_params` declares them."""

from quire.protocol.parameters.declaration import Declared, Parameter, declared, parameter
from quire.protocol.parameters.foreign import FOREIGN_PARAMS
from quire.protocol.parameters.repetition import RepetitionDetectionParams

__all__ = [
    "FOREIGN_PARAMS",
    "Declared",
    "Parameter",
    "RepetitionDetectionParams",
    "declared",
    "parameter",
]
