"""quire: LLM inference and serving with a paged KV cache.

>>> from quire import LLM, SamplingParams
>>> LLM().generate("import ", SamplingParams(max_tokens=8))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.base.errors import ConfigError, EngineError, QuireError, RequestError
    from quire.entrypoints.async_llm import AsyncLLM
    from quire.entrypoints.async_llm import AsyncLLM as AsyncLLMEngine
    from quire.entrypoints.engine_args import AsyncEngineArgs, EngineArgs
    from quire.entrypoints.llm import LLM
    from quire.entrypoints.llm_engine import LLMEngine
    from quire.inputs import PromptType, TextPrompt, TokensPrompt
    from quire.protocol.adapters import LoRARequest
    from quire.protocol.beam_search import BeamSearchParams
    from quire.protocol.grammar import StructuredOutputsParams
    from quire.protocol.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.protocol.pooling_params import PoolingParams
    from quire.protocol.sampling_params import RequestOutputKind, SamplingParams
    from quire.protocol.scheduling_params import SchedulingParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineError",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "QuireError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngineArgs": "quire.entrypoints.engine_args",
    "AsyncLLM": "quire.entrypoints.async_llm",
    "EngineArgs": "quire.entrypoints.engine_args",
    "LLMEngine": "quire.entrypoints.llm_engine",
    "PromptType": "quire.inputs",
    "RequestMetrics": "quire.protocol.outputs",
    "RequestOutputKind": "quire.protocol.sampling_params",
    "TextPrompt": "quire.inputs",
    "TokensPrompt": "quire.inputs",
    "LLM": "quire.entrypoints.llm",
    "BeamSearchOutput": "quire.protocol.outputs",
    "BeamSearchParams": "quire.protocol.beam_search",
    "BeamSearchSequence": "quire.protocol.outputs",
    "CompletionOutput": "quire.protocol.outputs",
    "LoRARequest": "quire.protocol.adapters",
    "Logprob": "quire.protocol.outputs",
    "ClassificationOutput": "quire.protocol.outputs",
    "ClassificationRequestOutput": "quire.protocol.outputs",
    "EmbeddingOutput": "quire.protocol.outputs",
    "EmbeddingRequestOutput": "quire.protocol.outputs",
    "ScoringOutput": "quire.protocol.outputs",
    "ScoringRequestOutput": "quire.protocol.outputs",
    "PoolingOutput": "quire.protocol.outputs",
    "PoolingParams": "quire.protocol.pooling_params",
    "PoolingRequestOutput": "quire.protocol.outputs",
    "RequestOutput": "quire.protocol.outputs",
    "SamplingParams": "quire.protocol.sampling_params",
    "SchedulingParams": "quire.protocol.scheduling_params",
    "StructuredOutputsParams": "quire.protocol.grammar",
    "ConfigError": "quire.base.errors",
    "EngineError": "quire.base.errors",
    "QuireError": "quire.base.errors",
    "RequestError": "quire.base.errors",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that `import quire` costs nothing."""
    import importlib

    if name == "AsyncLLMEngine":  # as vLLM's users also call it
        name = "AsyncLLM"
    if name not in _HOMES:
        raise importlib.import_module("quire.base.idioms").missing_name("quire", name, __all__)
    return getattr(importlib.import_module(_HOMES[name]), name)
