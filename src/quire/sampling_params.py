"""`quire.sampling_params`: sampling parameters, under the names of vLLM's module."""

from quire.base.idioms import missing_name
from quire.protocol.beam_search import BeamSearchParams
from quire.protocol.grammar import StructuredOutputsParams
from quire.protocol.parameters.repetition import RepetitionDetectionParams
from quire.protocol.sampling_params import LogitsProcessor, RequestOutputKind, SamplingParams

__all__ = [
    "BeamSearchParams",
    "LogitsProcessor",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name, __all__)
