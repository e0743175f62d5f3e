"""Attention over the paged cache: one door, several backends."""

from quire.attention.backend import AttentionBackend
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.attention.select import (
    AttentionNeeds,
    BackendChoice,
    backend_of_isa,
    select_backend,
)
from quire.attention.step_inputs import GroupInputs, KVPool, StepInputs

__all__ = [
    "AttentionBackend",
    "AttentionNeeds",
    "BackendChoice",
    "CpuAttention",
    "GroupInputs",
    "KVPool",
    "ReferenceAttention",
    "StepInputs",
    "backend_of_isa",
    "select_backend",
]
