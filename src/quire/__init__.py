"""quire: LLM inference and serving with a paged KV cache.

>>> from quire import LLM, SamplingParams
>>> LLM().generate("import ", SamplingParams(max_tokens=8))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.errors import ConfigError, EngineError, QuireError, RequestError
    from quire.llm import LLM
    from quire.protocol.beam_search import BeamSearchParams
    from quire.protocol.grammar import StructuredOutputsParams
    from quire.protocol.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestOutput,
    )
    from quire.protocol.sampling_params import SamplingParams
    from quire.protocol.scheduling_params import SchedulingParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigError",
    "EngineError",
    "Logprob",
    "QuireError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulingParams",
    "StructuredOutputsParams",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "LLM": "quire.llm",
    "BeamSearchOutput": "quire.protocol.outputs",
    "BeamSearchParams": "quire.protocol.beam_search",
    "BeamSearchSequence": "quire.protocol.outputs",
    "CompletionOutput": "quire.protocol.outputs",
    "Logprob": "quire.protocol.outputs",
    "RequestOutput": "quire.protocol.outputs",
    "SamplingParams": "quire.protocol.sampling_params",
    "SchedulingParams": "quire.protocol.scheduling_params",
    "StructuredOutputsParams": "quire.protocol.grammar",
    "ConfigError": "quire.errors",
    "EngineError": "quire.errors",
    "QuireError": "quire.errors",
    "RequestError": "quire.errors",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that `import quire` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
