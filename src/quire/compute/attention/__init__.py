"""Attention over the paged cache: one door, several backends."""

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.kernels import KernelAttention
from quire.compute.attention.kv_pool import KVPool, LayerCache
from quire.compute.attention.needs import AttentionNeeds
from quire.compute.attention.reference import ReferenceAttention
from quire.compute.attention.scores import PLAIN_SCORES, ScoreOptions
from quire.compute.attention.select import (
    BackendChoice,
    GroupBackends,
    backend_of_isa,
    select_backend,
    select_backends,
)
from quire.compute.attention.step_inputs import (
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
