"""`quire.outputs`: outputs of requests, under the names of vLLM's module."""

from quire.base.idioms import missing_name
from quire.protocol.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ChatAnswer,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FunctionCall,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    ToolCall,
)

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ChatAnswer",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FunctionCall",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ToolCall",
]


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name, __all__)
