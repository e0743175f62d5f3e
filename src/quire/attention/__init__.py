"""Attention over the paged cache: one door, several backends."""

from quire.attention.backend import AttentionBackend
from quire.attention.kernels import KernelAttention
from quire.attention.kv_pool import KVPool, LayerCache
from quire.attention.needs import AttentionNeeds
from quire.attention.reference import ReferenceAttention
from quire.attention.scores import PLAIN_SCORES, ScoreOptions
from quire.attention.select import (
    BackendChoice,
    GroupBackends,
    backend_of_isa,
    select_backend,
    select_backends,
)
from quire.attention.step_inputs import (
    GivenRows,
    GroupInputs,
    SequenceStates,
    StateInputs,
    StepInputs,
)

__all__ = [
    "AttentionBackend",
    "AttentionNeeds",
    "BackendChoice",
    "KernelAttention",
    "GivenRows",
    "GroupBackends",
    "GroupInputs",
    "KVPool",
    "LayerCache",
    "PLAIN_SCORES",
    "ReferenceAttention",
    "ScoreOptions",
    "SequenceStates",
    "StateInputs",
    "StepInputs",
    "backend_of_isa",
    "select_backend",
    "select_backends",
]
