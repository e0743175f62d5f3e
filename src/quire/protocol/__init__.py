"""Messages that cross a boundary. Frozen, and free of torch."""

from quire.protocol.beam_search import BeamRules, BeamSearchParams
from quire.protocol.request import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    SequenceFinish,
    WholeSequence,
)
from quire.protocol.sampling_params import LogitsProcessor, SamplingParams
from quire.protocol.scheduling_params import SchedulingParams
from quire.protocol.step import (
    EMPTY_INTS,
    EnterRow,
    ForkRow,
    IntArray,
    PromptLogprobs,
    RowFailure,
    StepPlan,
    StepResult,
    TicketFailure,
    TokenCandidates,
    TokenLogprobs,
)

__all__ = [
    "EMPTY_INTS",
    "BeamRules",
    "BeamSearchParams",
    "EngineOutput",
    "EngineRequest",
    "EnterRow",
    "FinishReason",
    "ForkRow",
    "IntArray",
    "LogitsProcessor",
    "PromptLogprobs",
    "RowFailure",
    "SamplingParams",
    "SchedulingParams",
    "SequenceFinish",
    "StepPlan",
    "StepResult",
    "TicketFailure",
    "TokenCandidates",
    "TokenLogprobs",
    "WholeSequence",
]
