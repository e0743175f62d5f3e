"""Operations: a folder each with contract, reference, inputs and providers; chosen at build."""

from quire.ops.check import CheckReport, check_provider
from quire.ops.linear import PackedMatrix
from quire.ops.operation import Case, Op, Provider, Tolerance
from quire.ops.registry import (
    ALL_OPS,
    REFERENCE,
    OpSet,
    build_op_set,
    force_gpu_kernels,
    force_invariance,
    force_isa,
    select,
)
from quire.ops.team import ALONE, Team

__all__ = [
    "ALL_OPS",
    "ALONE",
    "REFERENCE",
    "Case",
    "CheckReport",
    "Op",
    "OpSet",
    "PackedMatrix",
    "Provider",
    "Team",
    "Tolerance",
    "build_op_set",
    "check_provider",
    "force_gpu_kernels",
    "force_invariance",
    "force_isa",
    "select",
]
